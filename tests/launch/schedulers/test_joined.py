"""The processes of srun, torchrun and Kubernetes know their places; anything else is no launch to join."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from engine.launch.schedulers.joined import Joined, joined
from tests.refusals import refused

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "gpu-a",
    "MASTER_PORT": "29500",
}
# As Slurm 22.05 sets them for task 1 of `srun -N2 -n2`.
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
}
K8S = {"JOB_COMPLETION_INDEX": "2", "BYTESCALE_NODES": "4", "BYTESCALE_JOB": "uid"}


def place(**environment: str) -> Joined:
    found = joined(environment)
    assert found is not None
    return found


def test_places() -> None:
    of_torchrun = place(**TORCHRUN)
    assert (of_torchrun.node, of_torchrun.nodes, of_torchrun.local, of_torchrun.processes) == (1, 2, 1, 4)
    of_srun = place(**SRUN)
    assert (of_srun.node, of_srun.nodes, of_srun.local, of_srun.processes) == (1, 2, 0, 1)
    by_ranks = place(**SRUN | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3", "SLURM_PROCID": "7"})
    assert (by_ranks.node, by_ranks.nodes, by_ranks.local, by_ranks.processes) == (1, 2, 3, 4)
    even = place(**SRUN | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"})
    assert (even.nodes, even.processes) == (2, 4) and place(**TORCHRUN | {"GROUP_WORLD_SIZE": "2"}) == of_torchrun
    of_k8s = place(**K8S)
    assert (of_k8s.node, of_k8s.nodes, of_k8s.local, of_k8s.processes) == (2, 4, 0, 1)
    plain = place(RANK="1", WORLD_SIZE="2", MASTER_ADDR="a")
    assert (plain.node, plain.nodes, plain.local, plain.processes) == (1, 2, 0, 1)
    assert not any(one.first for one in (of_torchrun, of_srun, by_ranks, of_k8s, plain))
    assert place(**SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}).first


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"},  # a batch script
        {"JOB_COMPLETION_INDEX": "0"},  # a Job of somebody else
        {"RANK": "0"},
    ],
)
def test_no_launch_to_join(environment: dict[str, str]) -> None:
    assert joined(environment) is None


def test_a_shell_that_srun_has_started_is_no_launch_but_the_srun_of_its_user_is() -> None:
    """The variables of the shell reach the tasks of the second srun, which read from no terminal."""
    shell = SRUN | {"SLURM_PTY_PORT": "1234"}
    assert joined(shell, terminal=True) is None
    assert joined(shell, terminal=False) is not None and joined(SRUN, terminal=True) is not None


def test_each_launch_has_a_name_of_its_own() -> None:
    """A file that an earlier launch has left must not be taken for that of this one."""
    launches = [
        *(SRUN, SRUN | {"SLURM_STEP_ID": "1"}, SRUN | {"SLURM_JOB_ID": "8"}, SRUN | {"SLURM_RESTART_COUNT": "1"}),
        *(TORCHRUN, TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}, TORCHRUN | {"MASTER_PORT": "29501"}, K8S),
    ]
    assert len({place(**one).key for one in launches}) == len(launches)
    assert place(**SRUN).key == place(**SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}).key


def test_restarted_jobs_are_recognised() -> None:
    assert not place(**SRUN).restarted and place(**SRUN | {"SLURM_RESTART_COUNT": "1"}).restarted
    assert not place(**TORCHRUN).restarted and place(**TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}).restarted
    assert place(**K8S).restarted, "a pod does not know whether it has replaced another"


def test_nodes_and_ranks_follow_from_the_processes() -> None:
    nodes = ["cluster.hostfile=null", "cluster.nodes=2"]
    assert place(**TORCHRUN).settings([]) == [*nodes, "cluster.ranks_per_node=4"]
    assert place(**SRUN).settings(["recipe=quickstart"]) == nodes, "the config says how many ranks a node has"
    one_each = TORCHRUN | {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert place(**one_each).settings([]) == [*nodes, "cluster.ranks_per_node=1"]
    assert place(**one_each).settings(["cluster.ranks_per_node=8"]) == nodes, "one process of torchrun on each node"
    assert place(**TORCHRUN).settings(["cluster.nodes=2", "cluster.ranks_per_node=4"]) == nodes[:1]


@pytest.mark.parametrize("given", ["cluster.nodes=3", "cluster.ranks_per_node=2", "cluster.hostfile=hosts"])
def test_contradictions_are_refused(given: str) -> None:
    """tests/mistakes/hosts.yaml has what is said."""
    with refused(ConfigError, given):
        place(**TORCHRUN).settings([given])


@pytest.mark.parametrize(
    ("environment", "key"),
    [
        (TORCHRUN | {"RANK": "x"}, "RANK"),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "3"}, "cluster.nodes"),
        (
            SRUN | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "5,3"},
            "SLURM_STEP_TASKS_PER_NODE",
        ),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "3"}, "cluster.nodes"),
    ],
)
def test_variables_that_make_no_sense_are_refused(environment: dict[str, str], key: str) -> None:
    with refused(ConfigError, key):
        joined(environment)
