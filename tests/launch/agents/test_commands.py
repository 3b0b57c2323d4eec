from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cluster.cluster import Node
from engine.cluster.hosts import is_local
from engine.config.load import load
from engine.config.schema import Config
from engine.job import Job
from engine.launch.agents.commands import node_commands
from engine.run.folder import RunFolder

CPUS, GPUS = load([]), load(["cluster=h100x8"])


def test_local_ranks_share_one_agent(tmp_path: Path) -> None:
    (command,) = node_commands(Job(GPUS, (Node("localhost", 3),)), RunFolder(tmp_path), None)
    assert command.arguments == (sys.executable, "-m", "engine.launch.agents.agent")
    assert command.ranks == [0, 1, 2]
    assert command.work.environment["WORLD_SIZE"] == "3"
    assert command.work.peer is None and command.work.alone, "they need no interface"
    programs = [program for _, program in command.work.ranks]
    assert programs == [[sys.executable, "-m", "engine.trainer", str(tmp_path)]] * 3


def test_of_millions_of_ranks_only_the_first_commands_are_built(tmp_path: Path) -> None:
    nodes = tuple(Node(f"node-{number}", 64) for number in range(65536))
    commands = node_commands(Job(GPUS, nodes), RunFolder(tmp_path), None, limit=2)
    assert [command.host for command in commands] == ["node-0", "node-1"]
    assert commands[1].ranks == list(range(64, 128))


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [(GPUS, "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"), (CPUS, "MALLOC_MMAP_THRESHOLD_", "262144")],
    ids=["gpu", "cpu"],
)
@pytest.mark.parametrize("chosen", [None, "4096"])
def test_the_allocator_is_that_of_the_estimate_unless_the_user_chose_one(
    config: Config, name: str, value: str, chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv(name, chosen)
    (command,) = node_commands(Job(config, (Node("localhost", 1),)), RunFolder(tmp_path), None)
    assert command.work.environment[name] == (chosen or value)
    assert ("MALLOC_MMAP_THRESHOLD_" in command.work.environment) == (config is CPUS)


def test_an_allocator_that_the_user_chose_by_its_newer_name_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    here, there = node_commands(Job(GPUS, (Node("localhost", 1), Node("beta", 1))), RunFolder(tmp_path), None)
    assert all("PYTORCH_CUDA_ALLOC_CONF" not in command.work.environment for command in (here, there))
    assert there.work.environment["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"


def test_ranks_of_a_cluster_of_cpus_see_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed would train on a GPU of this machine, whatever the config says."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    nodes, folder = (Node("localhost", 1),), RunFolder(tmp_path)
    (on_cpu,) = node_commands(Job(CPUS, nodes), folder, None)
    (on_gpu,) = node_commands(Job(GPUS, nodes), folder, None)
    assert on_cpu.work.environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in {**on_gpu.environment, **on_gpu.work.environment}, "it is inherited"


def test_agents_of_other_hosts_start_over_ssh_and_ranks_find_the_first_host(tmp_path: Path) -> None:
    """ssh carries no variables over: those of ranks are in the job, which goes over the connection."""
    nodes = (Node("alpha", 1), Node("beta", 2), Node("gamma", 1))
    folder = RunFolder(tmp_path / "a run")
    commands = node_commands(Job(GPUS, nodes), folder, tmp_path / "step 1")
    assert [c.host for c in commands] == ["alpha", "beta", "gamma"]
    assert [c.ranks for c in commands] == [[0], [1, 2], [3]]
    assert [c.work.peer for c in commands] == ["beta", "alpha", "alpha"], "the route to it has the interface"
    assert not any(c.work.alone for c in commands), "a network may be cut"
    beta = commands[1]
    assert beta.arguments[0] == "ssh" and beta.arguments[-2] == "beta" and "BatchMode=yes" in beta.arguments
    assert shlex.split(beta.arguments[-1])[-3:] == [sys.executable, "-m", "engine.launch.agents.agent"]
    assert beta.work.environment["WORLD_SIZE"] == "4"
    assert beta.work.folder == str(folder.root)
    assert [program[-2:] for _, program in beta.work.ranks] == [[str(folder.root), str(tmp_path / "step 1")]] * 2


def test_a_single_host_that_is_another_machine_has_no_peer(tmp_path: Path) -> None:
    (command,) = node_commands(Job(GPUS, (Node("alpha", 2),)), RunFolder(tmp_path), None)
    assert command.work.peer is None and not command.work.alone


def test_ranks_find_a_host_without_the_user_of_its_ssh(tmp_path: Path) -> None:
    """`me@alpha` is no name that resolves."""
    nodes = (Node("me@alpha", 1), Node("me@beta", 1))
    first, second = node_commands(Job(GPUS, nodes), RunFolder(tmp_path), None)
    assert first.arguments[-2] == first.host == "me@alpha"
    assert (first.work.peer, second.work.peer) == ("beta", "alpha")


def test_a_first_host_that_is_this_machine_has_the_next_one_as_its_peer(tmp_path: Path) -> None:
    """It has no route to itself that others could use; and its agent is no ssh."""
    nodes = (Node(socket.gethostname(), 1), Node("beta", 1))
    first, second = node_commands(Job(GPUS, nodes), RunFolder(tmp_path), None)
    assert first.arguments[0] == sys.executable and first.work.peer == "beta"
    assert second.work.peer == socket.gethostname()


def test_hosts_that_are_this_machine() -> None:
    assert is_local("localhost") and is_local("127.0.0.1") and is_local(socket.gethostname())
    assert not is_local("some-other-host")


def test_a_shell_of_another_host_reads_folders_and_values_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ssh gives its words to a shell: an unquoted name could run a command there."""
    hostile = "a b'; touch $(echo made) `id` \n\"\\ -x"
    (tmp_path / hostile).mkdir()
    monkeypatch.chdir(tmp_path / hostile)
    monkeypatch.setenv("LD_LIBRARY_PATH", hostile)
    monkeypatch.setattr(sys, "executable", f"/{hostile}/python")
    nodes = (Node("alpha", 1), Node("beta", 1))
    command = node_commands(Job(GPUS, nodes), RunFolder(tmp_path / hostile), None)[1].arguments[-1]
    shown = command.replace(" && exec env ", " && printf '%s\\0' \"$PWD\" ", 1)
    done = subprocess.run(["sh", "-c", shown], cwd="/", capture_output=True, text=True, check=True)
    place, *words, last = done.stdout.split("\0")
    assert place == str(tmp_path / hostile) and last == ""
    assert f"LD_LIBRARY_PATH={hostile}" in words and words[-3:] == [sys.executable, "-m", "engine.launch.agents.agent"]
    assert not list(tmp_path.rglob("made"))
