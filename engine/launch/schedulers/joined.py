"""Recognises that srun, torchrun or Kubernetes has started this command on every node, from the variables they set.

| started by | variables |
|---|---|
| torchrun | TORCHELASTIC_RUN_ID, RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE |
| srun | SLURM_STEP_ID, SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NUM_NODES, SLURM_STEP_TASKS_PER_NODE,
SLURM_NODEID, SLURM_LOCALID |
| Kubernetes | JOB_COMPLETION_INDEX; BYTESCALE_NODES and BYTESCALE_JOB from the manifest of `--launcher k8s` |
| others | RANK, WORLD_SIZE, MASTER_ADDR, perhaps MASTER_PORT, LOCAL_RANK and LOCAL_WORLD_SIZE |

Each node has one process, which starts as many ranks as the config says, or one for each rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.config.units import counted
from engine.errors import ConfigError, Problem

NODES, JOB = "BYTESCALE_NODES", "BYTESCALE_JOB"  # set by the manifest (engine/launch/schedulers/k8s.py)


@dataclass(frozen=True)
class Joined:
    """The place of this process among those that a scheduler has started."""

    by: str
    job: str  # differs between two launches, except that MASTER_ADDR and MASTER_PORT may be the same again
    node: int
    nodes: int
    local: int  # number of this process on its node
    processes: int  # of each node
    of_ranks: bool  # whether `processes` was given as the number of ranks, also if it is 1
    restarted: bool  # whether the launch may be another attempt of a job

    @property
    def first(self) -> bool:
        """Whether this process is the launcher."""
        return self.node == 0 and self.local == 0

    @property
    def key(self) -> str:
        """A short name of the launch for files and sockets."""
        return hashlib.sha256(self.job.encode()).hexdigest()[:12]

    def settings(self, overrides: Sequence[str]) -> list[str]:
        """Return the overrides that follow from the processes. Raises ConfigError if those given contradict them."""
        given = dict(text.split("=", 1) for text in overrides if "=" in text)
        follow = {"cluster.nodes": self.nodes}
        if self.processes > 1 or (self.of_ranks and "cluster.ranks_per_node" not in given):
            follow["cluster.ranks_per_node"] = self.processes
        problems = []
        if given.get("cluster.hostfile", "null") != "null":
            what, key = f"{self.by} has already chosen the hosts", f"cluster.hostfile={given['cluster.hostfile']}"
            problems.append(Problem(what, key, "leave it out, or ignore them with --launcher hostfile"))
        for key, value in follow.items():
            if given.get(key, str(value)) != str(value):
                tasks, nodes = counted(self.processes * self.nodes, "task"), counted(self.nodes, "node")
                what = f"contradicts {self.by}, which has started {tasks} on {nodes}"
                problems.append(Problem(what, f"{key}={given[key]}", f"leave it out, or set {key}={value}"))
        if problems:
            raise ConfigError.of(problems)
        return [f"{key}={value}" for key, value in {"cluster.hostfile": "null", **follow}.items() if key not in given]


def joined(environment: Mapping[str, str], terminal: bool = False) -> Joined | None:
    """Return the place of this process; None if the variables say nothing about others.

    `terminal` says whether the process reads from a terminal: `srun --pty` starts a shell in which a user types, on
    the first of its nodes only. Its variables reach another srun, too, which the user starts there.

    Raises ConfigError if a variable is not a number, or if the nodes have different numbers of processes.
    """

    def number(name: str, default: str | None = None) -> int:
        text = environment.get(name) or default
        if text is None or not text.isdecimal():
            message = f"is {text or 'missing'}, not a number, though {by} has started this process"
            raise ConfigError(message, key=name, hint="use --launcher local to ignore it")
        return int(text)

    by = next((by for by, names in _SIGNS.items() if all(environment.get(name) for name in names)), None)
    if by is None:
        return None
    if by == "srun":
        if terminal and "SLURM_PTY_PORT" in environment:
            return None
        total, nodes = number("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS")), number("SLURM_STEP_NUM_NODES")
        tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
        if len(_counts(tasks)) > 1:
            message = f"srun has started {tasks} tasks on {counted(nodes, 'node')}: nodes need equal numbers"
            raise ConfigError(
                message, key="SLURM_STEP_TASKS_PER_NODE", hint="start one task on each node: srun -n NODES"
            )
        attempt = number("SLURM_RESTART_COUNT", "0")
        job = f"{environment.get('SLURM_JOB_ID')}.{environment['SLURM_STEP_ID']}.{attempt}"
        place = Joined(
            by, job, number("SLURM_NODEID"), nodes, number("SLURM_LOCALID"), total // nodes, False, attempt > 0
        )
    elif by == "Kubernetes":
        nodes = total = number(NODES)
        place = Joined(by, environment[JOB], number("JOB_COMPLETION_INDEX"), nodes, 0, 1, False, True)
    else:
        # torchrun, or another program that sets its variables. Those that it leaves out follow from the rank and the
        # world size.
        rank, total = number("RANK"), number("WORLD_SIZE")
        processes = number("LOCAL_WORLD_SIZE", "1")
        attempt = number("TORCHELASTIC_RESTART_COUNT", "0")
        parts = (environment.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"))
        node = number("GROUP_RANK", str(rank // max(processes, 1)))
        local = number("LOCAL_RANK", str(rank % max(processes, 1)))
        of_ranks = "LOCAL_WORLD_SIZE" in environment
        nodes = number("GROUP_WORLD_SIZE", str(total // max(processes, 1)))
        place = Joined(by, f"{':'.join(parts)}.{attempt}", node, nodes, local, processes, of_ranks, attempt > 0)
    if place.processes < 1 or place.processes * place.nodes != total:
        message = f"{by} has started {counted(total, 'task')} on {counted(nodes, 'node')}: nodes need equal numbers"
        raise ConfigError(message, key="cluster.nodes", hint="start one process on each node")
    return place


def _counts(tasks: str) -> set[str]:
    """Return the different numbers of tasks in a list of Slurm, such as `8(x2),4`, which stands for 8, 8, 4."""
    return {one.partition("(")[0].strip() for one in tasks.split(",") if one.strip()}


# The first whose variables are all set has started this process.
_SIGNS = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"),
    "srun": ("SLURM_STEP_ID", "SLURM_PROCID"),
    "Kubernetes": ("JOB_COMPLETION_INDEX", NODES, JOB),
    "the environment (RANK, WORLD_SIZE, MASTER_ADDR)": ("RANK", "WORLD_SIZE", "MASTER_ADDR"),
}
