"""Ray on a node: started with a token on one interface, started again when it dies, and ended whatever dies."""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.remote import node
from engine.remote.checks import own_environment
from engine.remote.node import NodeRay, Settings, free_port, object_store, remove_leftovers, token_of
from engine.remote.plane import ADDRESS, TOKEN_PATH
from engine.remote.plane import TOKEN as TOKEN_VALUE
from engine.remote.probe import cluster_problem
from tests.remote.rays import START_S, listening, said, session, until

pytest.importorskip("ray")
TOKEN, MEMORY = token_of(b"secret of the test"), 400 << 20
STARTS = """
import sys, time
from pathlib import Path
from engine.remote.node import NodeRay
ray = NodeRay.start_head("127.0.0.1", 0, 400 << 20, "token", Path(sys.argv[1]))
print(ray._guard.pid, ray._settings.folder, flush=True)
while True:
    for message in ray.receive():
        print(message, flush=True)
"""


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that starts Ray and waits, as an agent does."""
    command = [sys.executable, "-c", STARTS, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def started(process: subprocess.Popen[str]) -> tuple[int, Path, dict[int, str]]:
    """The guard, the folder and all processes of Ray, when it is up."""
    assert process.stdout is not None
    guard, folder = process.stdout.readline().split()
    assert "up" in process.stdout.readline()
    return int(guard), Path(folder), session(int(guard))


@pytest.mark.world
@pytest.mark.long
def test_two_nodes_of_one_machine(tmp_path: Path) -> None:
    """Ports, modes and names; what dies is started again, and the other node stays; nothing is left at the end."""
    shared = set(Path("/dev/shm").iterdir())
    head = NodeRay.start_head("127.0.0.1", 0, MEMORY, TOKEN, tmp_path / "head")
    other = NodeRay.join(head.address, "127.0.0.1", 1, MEMORY, TOKEN, tmp_path / "other")
    guards = [head._guard.pid, other._guard.pid]
    folders = [Path(one._settings.folder) for one in (head, other)]
    own = own_environment()
    try:
        assert said(head) == said(other) == ["up"]
        below = [session(guard) for guard in guards]
        names = [set(one.values()) for one in below]
        assert {"gcs_server", "raylet"} <= names[0] and "raylet" in names[1] and "gcs_server" not in names[1]
        # Neither a dashboard, nor the jobs API, nor the client server, which would execute code.
        assert {name for one in below for name, _ in listening(one)} <= {"gcs_server", "raylet", "ray::RuntimeEnv"}
        assert {address for one in below for _, address in listening(one)} == {"127.0.0.1"}
        for folder, ray in zip(folders, (head, other), strict=True):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
            assert (folder / "token").read_text() == TOKEN and ray.environment[TOKEN_PATH] == str(folder / "token")
            assert ray.environment[ADDRESS] == head.address
            for pid in session(ray._guard.pid):
                assert TOKEN.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert cluster_problem(head.address, 2, own | head.environment) is None
        third = cluster_problem(head.address, 3, own | head.environment)
        assert third is not None and "bytescale-host-2" in third.message and "bytescale-host-2" in str(third.hint)
        strange = cluster_problem(head.address, 2, own | head.environment | {TOKEN_VALUE: "0" * 64})
        assert strange is not None and head.address in str(strange.key) and "TOKEN" in str(strange.hint)
        nodes = json.loads(connected(head, head.environment))
        assert sorted(nodes) == ["bytescale-host-0", "bytescale-host-1"]
        (server,) = servers(head)
        os.kill(server, signal.SIGKILL)
        assert until(lambda: servers(head) - {server})
        for ray in (other, head):
            for one in psutil.Process(ray._guard.pid).children(recursive=True):
                if "engine.remote.guard" not in one.cmdline():
                    one.kill()
            assert said(ray, 2) == ["down", "up"]
        # The head may take the node that has died for alive until it has missed its health checks.
        assert until(lambda: sorted(json.loads(connected(head, head.environment))) == sorted(nodes))
        assert not select.select([head, other], [], [], 0)[0], "neither has died when the other one did"
    finally:
        head.end()
        other.end()
    assert [session(guard) for guard in guards] == [{}, {}]
    assert not any(folder.exists() for folder in folders)
    assert until(lambda: set(Path("/dev/shm").iterdir()) <= shared, 10), "what other tests have there goes soon"


def servers(ray: NodeRay) -> set[int]:
    """The processes of the head's server."""
    return {pid for pid, name in session(ray._guard.pid).items() if name == "gcs_server"}


def connected(ray: NodeRay, environment: dict[str, str]) -> str:
    """The resources of hosts that a driver sees, as JSON."""
    code = (
        "import json, os, sys, ray\n"
        f"ray.init({ray.address!r}, _node_ip_address='127.0.0.1', log_to_driver=False)\n"
        "found = [name for one in ray.nodes() if one['Alive'] for name in one['Resources']]\n"
        "print(json.dumps([name for name in found if name.startswith('bytescale')]))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=own_environment() | environment, capture_output=True, text=True, check=True, timeout=START_S
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.world
@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "guards"),
    [(None, []), (signal.SIGSTOP, [0, 1]), (signal.SIGKILL, [0]), (signal.SIGKILL, [1])],
    ids=["well", "stopped", "first", "second"],
)
def test_nothing_is_left_of_a_starter_that_was_killed(
    starter: subprocess.Popen[str], how: signal.Signals | None, guards: list[int]
) -> None:
    """DashboardAgent and RuntimeEnvAgent survive their parents. One process of the guard may be killed, too."""
    guard, folder, processes = started(starter)
    assert len(processes) >= 4 and folder.exists()
    both = [guard, *(one.pid for one in psutil.Process(guard).children() if "engine.remote.guard" in one.cmdline())]
    assert len(both) == 2
    for number in guards:
        assert how is not None
        os.kill(both[number], how)
    starter.kill()
    starter.wait()
    assert until(lambda: not session(guard) and not folder.exists(), 10.0), session(guard)


@pytest.mark.world
@pytest.mark.long
def test_the_end_kills_what_a_killed_guard_has_left(tmp_path: Path) -> None:
    """Both processes of it."""
    ray = NodeRay.start_head("127.0.0.1", 0, MEMORY, TOKEN, tmp_path / "log")
    try:
        assert said(ray) == ["up"]
        for one in (ray._guard.pid, *(child.pid for child in psutil.Process(ray._guard.pid).children())):
            if "engine.remote.guard" in psutil.Process(one).cmdline():
                os.kill(one, signal.SIGSTOP if one == ray._guard.pid else signal.SIGKILL)
        os.kill(ray._guard.pid, signal.SIGKILL)
        with pytest.raises(EOFError):
            said(ray)
        assert len(session(ray._guard.pid)) >= 4
    finally:
        ray.end()
    assert session(ray._guard.pid) == {} and not Path(ray._settings.folder).exists()


def test_folders_whose_processes_were_all_killed_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(node, "_FOLDERS", tmp_path)
    monkeypatch.setattr(node.subprocess, "Popen", FakeGuard)
    (tmp_path / "bytescale-ray-other").symlink_to(tmp_path / "elsewhere")
    left = NodeRay.start_head("127.0.0.1", 0, MEMORY, TOKEN, tmp_path / "log")
    folder = Path(left._settings.folder)
    remove_leftovers()
    assert folder.exists(), "its agent runs"
    os.close(left._lock)
    remove_leftovers()
    assert not folder.exists() and (tmp_path / "bytescale-ray-other").is_symlink()


def test_a_folder_is_not_taken_for_a_leftover_before_it_is_locked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another run starts on this host at the same time."""
    monkeypatch.setattr(node, "_FOLDERS", tmp_path)
    monkeypatch.setattr(node.subprocess, "Popen", FakeGuard)
    flock = node.fcntl.flock

    def other_first(lock: int, how: int) -> None:
        monkeypatch.setattr(node.fcntl, "flock", flock)
        remove_leftovers()
        flock(lock, how)

    monkeypatch.setattr(node.fcntl, "flock", other_first)
    made = NodeRay.start_head("127.0.0.1", 0, MEMORY, TOKEN, tmp_path / "log")
    remove_leftovers()
    assert (Path(made._settings.folder) / "token").read_text() == TOKEN
    assert [*tmp_path.glob("*bytescale-ray-*")] == [Path(made._settings.folder)]
    os.close(made._lock)


@pytest.mark.parametrize("what", ["certificates", "guard"])
def test_nothing_is_left_of_a_start_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str) -> None:
    """Neither the token nor the lock."""
    monkeypatch.setattr(node, "_FOLDERS", tmp_path)
    descriptors = {*os.listdir("/proc/self/fd")}  # noqa: PTH208

    def fail(*arguments: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((node.certificates, "write") if what == "certificates" else (node.subprocess, "Popen")), fail)
    with pytest.raises(OSError, match="No space"):
        NodeRay.start_head("127.0.0.1", 0, MEMORY, TOKEN, tmp_path / "log")
    assert not [*tmp_path.glob("*bytescale-ray-*")] and {*os.listdir("/proc/self/fd")} == descriptors  # noqa: PTH208


class FakeGuard:
    """A guard that only takes its settings."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.stdin = Path("/dev/null").open("wb")  # noqa: SIM115

    def __del__(self) -> None:
        self.stdin.close()


def test_a_head_that_never_listens_is_waited_for_not_long(tmp_path: Path) -> None:
    """And a node that waits for it ends at once with its agent."""
    ray = NodeRay.join(f"127.0.0.1:{free_port('127.0.0.1')}", "127.0.0.1", 1, MEMORY, TOKEN, tmp_path / "log")
    began = time.monotonic()
    ray.end()
    assert time.monotonic() - began < 5.0 and not Path(ray._settings.folder).exists()


def test_paths_of_sockets_are_short_enough() -> None:
    """Linux limits them to 107 bytes. Ray's own part has a time and a process number."""
    own = "/session_2026-11-29_23-03-02_097083_4194304/sockets/plasma_store"
    assert len("/tmp/bytescale-ray-" + "x" * 8 + "/r" + own) <= 107


def test_settings_survive_their_line() -> None:
    settings = Settings("fd00::1", "fd00::2", 7, False, 3, MEMORY, "/tmp/x")
    assert Settings.of_json(settings.to_json()) == settings
    assert settings.head_address == "[fd00::2]:7"


def test_the_object_store_is_a_bounded_share_of_the_memory() -> None:
    assert object_store(1 << 20) == 80 << 20 and object_store(4 << 30) == 1 << 30 and object_store(1 << 40) == 4 << 30


def test_tokens_follow_from_secrets() -> None:
    assert token_of(b"one") == token_of(b"one") != token_of(b"two")
    assert token_of(b"") != token_of(b"")
    assert len(token_of(b"")) == 64
