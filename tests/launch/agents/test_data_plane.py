"""Agents start Ray and its supervisor, and end them, whoever is killed; hosts that cannot be nodes say so."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from engine.config.load import load, resolved_yaml
from engine.control.link import Link
from engine.control.protocol import Ended, RayNode
from engine.errors import ExitCode, Problem
from engine.launch.agents import data_plane
from engine.launch.agents.agent import Agent
from engine.remote import checks
from engine.remote.node import free_port
from engine.remote.plane import ADDRESS, NODE_ADDRESS, START, TOKEN, TOKEN_PATH
from engine.run.cause import Cause
from engine.run.folder import RunFolder
from tests.launch.agents.nodes import work
from tests.launch.ports import listening

MEMORY = 400 << 20
# What listens of each kind of process, on one host: docs/security.md has this table.
PORTS = {
    "gcs_server": {"127.0.0.1"},
    "raylet": {"127.0.0.1"},
    "ray::RuntimeEnvAgent": {"127.0.0.1"},
    "ray::DashboardAgent": set[str](),
    "ray::Actor": {"127.0.0.1"},
}
LAUNCHES = """
import sys
from pathlib import Path
from engine.control.protocol import RayNode
from engine.launch.agents.ranks import run_ranks
from engine.remote.checks import version
from engine.run.folder import RunFolder
from tests.launch.agents.nodes import AGENT, NodeCommand, work

folder = RunFolder(Path(sys.argv[1]))
rank = "import os, time; print(*(os.environ[n] for n in sys.argv[1:]), flush=True); time.sleep(600)"
rank = "import sys; sys.argv = [0, 'RAY_ADDRESS', 'RAY_AUTH_TOKEN_PATH', 'BYTESCALE_RAY_NODE']; " + rank
rays = [RayNode(n, version(), 400 << 20, None, [] if n else [[0], [1]], "1") for n in range(2)]
commands = [
    NodeCommand("localhost", AGENT, {}, work(folder, rank, first=ray.number, ray=ray)) for ray in rays
]
run_ranks(commands, folder, lambda: None, print)
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "logs").mkdir()
    return RunFolder(tmp_path)


Supervise = Callable[..., data_plane.DataPlane]
FAILED = Cause(ExitCode.PREFLIGHT, Problem("no process", hint="look"), whole=True).to_json()


@pytest.fixture
def supervisor(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Supervise:
    """Starts a DataPlane whose supervisor runs this code. With a cluster that runs already there is only it."""
    monkeypatch.setattr(data_plane, "_AGAIN_S", 0.0)
    started = data_plane.subprocess.Popen

    def start(code: str, complete: bool = False) -> data_plane.DataPlane:
        code = f"import json, sys\ndef say(one): print(json.dumps(one), flush=True)\n{code}"
        monkeypatch.setattr(
            data_plane.subprocess, "Popen", lambda command, **how: started([sys.executable, "-c", code], **how)
        )
        plane = data_plane.DataPlane(ray_node("127.0.0.1:9"), folder, dict(os.environ), "127.0.0.1", None, b"")
        plane._was_complete = complete
        return plane

    return start


def end_of(plane: data_plane.DataPlane) -> Cause | None:
    """Look after a data plane until it has failed; return why."""
    causes = list[Cause | None]()
    until(lambda: causes.append(plane.look()) or causes[-1], 60)
    plane.close()
    return causes[-1]


def until(found: Callable[[], object], seconds: float = 240.0) -> bool:
    """Wait until something is found; return whether it was."""
    last = time.monotonic() + seconds
    while time.monotonic() < last:
        if found():
            return True
        time.sleep(0.1)
    return False


def below(process: psutil.Process, name: str = "") -> list[psutil.Process]:
    """The processes below one, of those whose command line or name has `name`."""
    found = []
    for one in process.children(recursive=True):
        try:
            if name in one.name() or name in " ".join(one.cmdline()):
                found.append(one)
        except psutil.Error:
            continue
    return found


def supervisors(process: psutil.Process) -> set[int]:
    """The supervisors below a process."""
    found = set[int]()
    for one in below(process, "engine.remote"):
        with suppress(psutil.Error):  # it has just ended
            if one.cmdline()[-1:] == ["engine.remote"]:
                found.add(one.pid)
    return found


def ports(process: psutil.Process) -> dict[str, set[str]]:
    """Where the processes of Ray below a process listen, by kind. Linux knows 15 characters of a name."""
    found = dict[str, set[str]]()
    for one in below(process):
        with suppress(psutil.Error):
            for kind in PORTS:
                if one.name().startswith(kind[:15]):
                    found.setdefault(kind, set()).update(at.removeprefix("::ffff:") for at in listening([one]))
    return found


@pytest.mark.world
@pytest.mark.long
def test_ports_tokens_and_what_is_left_of_a_launcher_that_was_killed(folder: RunFolder) -> None:
    """Two nodes with real agents. The supervisor is killed, then the launcher; the table of ports is in the logs.

    The user has a token, which is for another cluster.
    """
    pytest.importorskip("ray")
    folder.resolved.write_text(resolved_yaml(load(["recipe=quickstart", "data.runtime=ray", "run.seed=1"])))
    shared = set(os.listdir("/dev/shm"))  # noqa: PTH208
    command, variables = [sys.executable, "-c", LAUNCHES, str(folder.root)], {**os.environ, TOKEN: "0" * 64}
    with subprocess.Popen(command, env=variables, start_new_session=True) as launcher:
        try:
            process = psutil.Process(launcher.pid)
            assert until(lambda: len(below(process, "ray::RuntimeEnv")) == 2 and below(process, "engine.remote.guard"))
            assert until(lambda: supervisors(process) and "ray::Actor" in ports(process))
            table = ports(process)
            (folder.logs / "ports.txt").write_text("\n".join(f"{name}: {sorted(at)}" for name, at in table.items()))
            assert table == PORTS
            places = [folder.log(rank).read_text().split() for rank in range(2)]
            assert places[0][0] == places[1][0] and {node for _, _, node in places} == {"127.0.0.1"}
            tokens = [Path(token) for _, token, _ in places]
            assert {stat.S_IMODE(token.stat().st_mode) for token in tokens} == {0o600}
            assert {stat.S_IMODE(token.parent.stat().st_mode) for token in tokens} == {0o700}
            assert len({token.read_text() for token in tokens}) == 1 and tokens[0] != tokens[1]

            (first,) = supervisors(process)
            os.kill(first, signal.SIGKILL)
            assert until(lambda: supervisors(process) - {first})

            everything = below(process)
            launcher.kill()
            launcher.wait()
            assert not psutil.wait_procs(everything, timeout=20)[1]
            assert until(lambda: not any(token.parent.exists() for token in tokens), 10)
            assert set(os.listdir("/dev/shm")) <= shared  # noqa: PTH208
        finally:
            launcher.kill()


def start(folder: RunFolder, ray: RayNode, variables: dict[str, str]) -> list[Ended]:
    """What an agent tells the launcher of a start with this data plane, on the only node."""
    ours, theirs = (end.detach() for end in socket.socketpair())
    link, other = Link(ours, ours), Link(theirs, theirs)
    agent = Agent(link)
    try:
        agent._start(work(folder, "pass", environment=variables, ray=ray), None)
        return [message for message in other.receive() if isinstance(message, Ended)]
    finally:
        agent.close()
        link.close()
        other.close()


def ray_node(address: str | None = None, version: str | None = None) -> RayNode:
    return RayNode(0, version or checks.version() or "2.60.0", MEMORY, address, [[0]], "1")


@pytest.mark.parametrize("case", ["missing", "version", "shared", "address", "token"])
def test_a_host_that_cannot_be_a_node_says_so_at_once(
    case: str, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checks, "version", lambda: None if case == "missing" else "2.60.0")
    free = MEMORY if case != "shared" else 1 << 20
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (TOKEN, TOKEN_PATH):
        monkeypatch.delenv(name, raising=False)
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    variables = {TOKEN: "x"} if case == "address" else {}
    ray = ray_node(address if case in ("address", "token") else None, "2.61.0" if case == "version" else "2.60.0")
    began = time.monotonic()
    (end,) = start(folder, ray, variables)
    assert time.monotonic() - began < 10
    assert end.cause is not None and end.cause.whole and end.cause.code == ExitCode.PREFLIGHT
    problem = end.cause.problem
    said = f"{problem.key} {problem.message} {problem.hint}"
    names = {
        "missing": "pip install ray",
        "version": "2.61.0",
        "shared": "/dev/shm",
        "address": address,
        "token": TOKEN_PATH,
    }
    assert names[case] in said and ("data.r" in said)


@pytest.mark.parametrize("head", [None, "127.0.0.1:9"])
def test_variables_of_ray_of_the_user_do_not_apply(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, head: str | None
) -> None:
    """Neither to Ray of the run, nor to the supervisor, ranks and planning processes, which connect to it."""
    given = list[Mapping[str, str]]()

    def begin(*arguments: Any) -> SimpleNamespace:
        given.append(arguments[-1])
        return SimpleNamespace(address="127.0.0.1:8", environment={TOKEN_PATH: "/of/the/run"})

    monkeypatch.setattr(data_plane, "NodeRay", SimpleNamespace(start_head=begin, join=begin))
    variables = {TOKEN: "0" * 64, TOKEN_PATH: "/of/the/user", "RAY_USE_TLS": "0", "PATH": "/bin"}
    plane = data_plane.DataPlane(ray_node(), folder, variables, "127.0.0.1", head, b"")
    assert plane.environment == {"PATH": "/bin", TOKEN_PATH: "/of/the/run", START: "1"}
    assert {**given[0]} == {"PATH": "/bin"}


def test_a_supervisor_that_always_ends_ends_the_run(
    folder: RunFolder, supervisor: Supervise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long each one lives."""
    now = itertools.count(step=40.0)
    monkeypatch.setattr(data_plane, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=time.sleep))
    plane = supervisor("sys.exit(7)")
    assert plane.environment[ADDRESS] == "127.0.0.1:9" and plane.environment[NODE_ADDRESS] == "127.0.0.1"
    cause = end_of(plane)
    assert cause is not None and cause.whole and cause.code == ExitCode.HANG
    assert str(folder.data_log("supervisor")) in str(cause.problem.hint) and "code 7" in cause.problem.message
    assert plane._ends == data_plane._MOST_ENDS


def test_what_a_supervisor_says_at_the_start_ends_the_run(supervisor: Supervise) -> None:
    plane = supervisor(f"say({FAILED}); sys.exit(3)")
    assert end_of(plane) == Cause(ExitCode.PREFLIGHT, Problem("no process", hint="look"), whole=True)
    assert plane._ends == 1


def test_what_a_supervisor_says_later_ends_the_run_when_it_says_it_again(supervisor: Supervise, tmp_path: Path) -> None:
    """A restart may help then. A supervisor that found an actor for each role makes the earlier ends void."""
    plane = supervisor(
        f"from pathlib import Path; log = Path({str(tmp_path / 'count')!r}); log.open('a').write('x')\n"
        f"if log.stat().st_size == 3: say({{}})\n"
        f"else: say({FAILED})\n"
        "sys.exit(3)",
        complete=True,
    )
    assert end_of(plane) == Cause(ExitCode.HANG, Problem("no process", hint="look"), whole=True)
    assert (tmp_path / "count").stat().st_size == 2 + data_plane._MOST_ENDS


@pytest.mark.parametrize("starts", [True, False])
def test_the_supervisor_says_whether_each_role_has_an_actor(
    starts: bool, folder: RunFolder, supervisor: Supervise
) -> None:
    """The real one, without Ray."""
    pytest.importorskip("ray")
    folder.resolved.write_text(resolved_yaml(load(["recipe=quickstart", "data.runtime=ray", "run.seed=1"])))
    plane = supervisor(
        "from engine.remote import __main__ as main\n"
        "from tests.remote.in_memory import MemoryBoard, MemoryFleet\n"
        "main.connect, main.RayBoard = lambda space: None, lambda space: MemoryBoard()\n"
        f"main.RayFleet = lambda space, roles: MemoryFleet(starts={starts})\n"
        "sys.exit(main.main())"
    )
    try:
        assert until(lambda: plane.look() or plane._was_complete, 60)
        assert plane._was_complete == starts
    finally:
        plane.close()
    if not starts:
        assert plane._cause is not None and plane._cause.code == ExitCode.PREFLIGHT and plane._cause.whole
        assert "host 0" in plane._cause.problem.message


def test_a_supervisor_ends_when_its_agent_does(folder: RunFolder, supervisor: Supervise) -> None:
    """It gets the time to end its actors in a cluster that stays."""
    supervisor("sys.stdin.read(); print('ended', file=sys.stderr, flush=True)").close()
    assert folder.data_log("supervisor").read_text() == "ended\n"
