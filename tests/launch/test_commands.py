from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

import pytest

from engine.cluster.cluster import Cluster, Node
from engine.launch.commands import free_port, is_local, rank_commands
from engine.trainer.folder import RunFolder


def test_local_ranks_share_one_rendezvous(tmp_path: Path) -> None:
    cluster = Cluster((Node("localhost", 3),), 2**30)
    commands = rank_commands(cluster, RunFolder(tmp_path), None, 1234)
    assert [c.environment["RANK"] for c in commands] == ["0", "1", "2"]
    assert {(c.environment["MASTER_ADDR"], c.environment["MASTER_PORT"]) for c in commands} == {("127.0.0.1", "1234")}
    assert all(c.arguments[:3] == (sys.executable, "-m", "engine.trainer") for c in commands)


def test_of_millions_of_ranks_only_the_first_commands_are_made(tmp_path: Path) -> None:
    cluster = Cluster(tuple(Node(f"node-{number}", 64) for number in range(65536)), 2**30)
    commands = rank_commands(cluster, RunFolder(tmp_path), None, 1234, most=65)
    assert [commands[rank].host for rank in (0, 64)] == ["node-0", "node-1"] and len(commands) == 65


def test_allocators_are_those_of_the_estimate_unless_somebody_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    (command,) = rank_commands(Cluster((Node("localhost", 1),), 2**30), RunFolder(tmp_path), None, 1234)
    assert command.environment["MALLOC_MMAP_THRESHOLD_"] == "131072"
    assert command.environment["PYTORCH_CUDA_ALLOC_CONF"] == "backend:native"


def test_ranks_of_other_hosts_start_over_ssh_and_find_the_first_host(tmp_path: Path) -> None:
    """What ssh runs there must set every variable itself: ssh carries none over."""
    cluster = Cluster((Node("alpha", 1), Node("beta", 2)), 2**30)
    folder = RunFolder(tmp_path / "a run")
    commands = rank_commands(cluster, folder, tmp_path / "step 1", 1234)
    assert [c.host for c in commands] == ["alpha", "beta", "beta"]
    last = commands[2]
    assert last.arguments[:4] == ("ssh", "-o", "BatchMode=yes", "beta")
    words = shlex.split(last.arguments[4])
    for setting in ("RANK=2", "LOCAL_RANK=1", "WORLD_SIZE=3", "MASTER_ADDR=alpha", "MASTER_PORT=1234"):
        assert setting in words
    assert words[-2:] == [str(folder.root), str(tmp_path / "step 1")]


def test_hosts_that_are_this_machine() -> None:
    assert is_local("localhost") and is_local("127.0.0.1") and is_local(socket.gethostname())
    assert not is_local("some-other-host")


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
