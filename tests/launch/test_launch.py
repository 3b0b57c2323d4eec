from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.load import load
from engine.job import Job
from engine.launch.launch import Launch
from engine.launch.schedulers.join import Joins
from engine.launch.schedulers.joined import Joined
from engine.run.folder import RunFolder


def test_a_launch_has_the_nodes_and_the_folder_of_its_config(tmp_path: Path) -> None:
    launch = Launch(Job(load([f"run.out={tmp_path}", "cluster.ranks_per_node=3"])), print)
    assert (launch.job.cluster.ranks, launch.folder.root) == (3, tmp_path)
    wider = replace(launch, job=Job(load(["run.out=other", "cluster.ranks_per_node=5"])))
    assert (wider.job.cluster.ranks, wider.folder.root) == (5, Path("other")), "not those of the first config"


def test_only_hosts_that_are_reached_over_ssh_get_variables_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of nodes that join have environments of their own."""
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "a")
    (tmp_path / "hosts").write_text("alpha slots=2\nbeta slots=2\n")
    by_ssh = Launch(Job(load([f"cluster.hostfile={tmp_path / 'hosts'}", f"run.out={tmp_path}"])), print)
    joins = Joins(Joined("srun", "1.0", 0, 2, 0, 1, False, False), RunFolder(tmp_path), {"GLOO_SOCKET_IFNAME": "lo"})
    joined = Launch(joins.job(Job(load(["cluster.nodes=2", f"run.out={tmp_path}"]))), print, joins)
    assert "NCCL_DEBUG" in by_ssh.forwarded().variables and by_ssh.forwarded().withheld == ["HF_TOKEN"]
    assert joined.forwarded() == ({}, [], [])
    for launch, peer, ssh in ((by_ssh, "alpha", True), (joined, "127.0.0.1", False)):
        first, second = launch.commands(tmp_path / "step-00000001")
        assert ("ssh" in second.arguments, "NCCL_DEBUG" in second.work.environment) == (ssh, ssh)
        assert second.work.peer == peer
        assert second.work.ranks[0][1][-1] == str(tmp_path / "step-00000001")
        assert launch.commands(None, limit=1)[0].ranks == first.ranks == list(range(launch.job.cluster.ranks // 2))
    assert joined.job.cluster.nodes[0].host == "localhost"
