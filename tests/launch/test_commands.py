from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

import pytest

from engine.cluster.cluster import Cluster, Node
from engine.cluster.hosts import is_local
from engine.config.load import load
from engine.launch.commands import free_port, rank_commands
from engine.run.folder import RunFolder

CPUS, GPUS = load([]), load(["cluster=h100x8"])


def test_local_ranks_share_one_rendezvous(tmp_path: Path) -> None:
    cluster = Cluster((Node("localhost", 3),), 2**30)
    commands = rank_commands(cluster, RunFolder(tmp_path), None, 1234, GPUS)
    assert [c.environment["RANK"] for c in commands] == ["0", "1", "2"]
    assert {(c.environment["MASTER_ADDR"], c.environment["MASTER_PORT"]) for c in commands} == {("127.0.0.1", "1234")}
    assert all(c.arguments[:3] == (sys.executable, "-m", "engine.trainer") for c in commands)


def test_of_millions_of_ranks_only_the_first_commands_are_built(tmp_path: Path) -> None:
    cluster = Cluster(tuple(Node(f"node-{number}", 64) for number in range(65536)), 2**30)
    commands = rank_commands(cluster, RunFolder(tmp_path), None, 1234, GPUS, limit=65)
    assert [commands[rank].host for rank in (0, 64)] == ["node-0", "node-1"] and len(commands) == 65


@pytest.mark.parametrize(("chosen", "set_to"), [(None, "expandable_segments:True"), ("backend:native",) * 2])
def test_the_allocator_is_that_of_the_estimate_unless_the_user_chose_one(
    chosen: str | None, set_to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if chosen is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", chosen)
    (command,) = rank_commands(Cluster((Node("localhost", 1),), 2**30), RunFolder(tmp_path), None, 1234, GPUS)
    assert command.environment["PYTORCH_CUDA_ALLOC_CONF"] == set_to


@pytest.mark.parametrize(
    ("ranks", "cores", "chosen", "set_to"),
    [(8, 64, None, "4"), (2, 2, None, "1"), (4, 2, None, "1"), (8, 64, "9", "9")],
)
def test_ranks_compile_in_a_few_processes_unless_the_user_chose_a_number(
    ranks: int, cores: int, chosen: str | None, set_to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch would start up to 32 in each rank."""
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", chosen)
    cluster = Cluster((Node("localhost", ranks),), 2**30)
    commands = rank_commands(cluster, RunFolder(tmp_path), None, 1234, GPUS)
    assert [command.environment["TORCHINDUCTOR_COMPILE_THREADS"] for command in commands] == [set_to] * ranks


def test_ranks_of_a_cluster_of_cpus_see_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed would train on a GPU of this machine, whatever the config says."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    cluster, folder = Cluster((Node("localhost", 1),), 2**30), RunFolder(tmp_path)
    (on_cpu,) = rank_commands(cluster, folder, None, 1234, CPUS)
    (on_gpu,) = rank_commands(cluster, folder, None, 1234, GPUS)
    assert on_cpu.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in on_gpu.environment, "it is inherited"


def test_ranks_of_other_hosts_start_over_ssh_and_find_the_first_host(tmp_path: Path) -> None:
    """ssh carries no variables over, so the remote command sets them."""
    cluster = Cluster((Node("alpha", 1), Node("beta", 2)), 2**30)
    folder = RunFolder(tmp_path / "a run")
    commands = rank_commands(cluster, folder, tmp_path / "step 1", 1234, GPUS)
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
