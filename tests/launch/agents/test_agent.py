"""The agent of a node starts ranks, says how they do, and leaves none behind, whatever happens to the launcher."""

from __future__ import annotations

import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from engine.cluster import numa
from engine.cluster.gpus import Gpu
from engine.control.link import SILENCE_S, Link
from engine.control.protocol import (
    Again,
    Asked,
    Beat,
    Beats,
    End,
    Ended,
    Hello,
    Kill,
    Stacks,
    Stop,
    Tree,
    line_of,
    message_of,
)
from engine.control.signals import STOP_SIGNALS
from engine.control.sockets import Listener
from engine.errors import ExitCode, Problem
from engine.launch.agents import agent as agents
from engine.launch.agents.agent import Agent
from engine.run.cause import Cause
from engine.run.folder import RunFolder
from tests.cluster.sysfs import fake
from tests.launch.agents.nodes import Launcher, real_rank, start, work

pytestmark = pytest.mark.long

GPU = Gpu("card", "0000:3b:00.0")
SLEEPS = "import time; time.sleep(60)"
CHILD = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True)"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "logs").mkdir()
    return RunFolder(tmp_path)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """The launcher's end of a new agent, which has said hello."""
    with Launcher(tmp_path / "agent.txt") as launcher:
        launcher.until(Hello)
        yield launcher


def ranks_of(launcher: Launcher, count: int = 1) -> list[psutil.Process]:
    """Wait until the ranks run their programs."""
    while True:
        children = psutil.Process(launcher.process.pid).children()
        if len(found := [child for child in children if "engine.launch.agents.agent" not in child.cmdline()]) == count:
            return sorted(found, key=lambda process: process.pid)
        time.sleep(0.01)


def test_the_agent_and_its_ranks_may_open_many_files(folder: RunFolder, tmp_path: Path) -> None:
    """ssh starts the agent with the limit of a login shell, usually 1,024; the launcher's does not reach it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        with Launcher(tmp_path / "agent.txt") as launcher:
            launcher.until(Hello)
            launcher.link.send(start(folder, SLEEPS))
            pids = [launcher.process.pid, *(process.pid for process in ranks_of(launcher))]
            limits = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert limits == [(hard if hard != resource.RLIM_INFINITY and hard < 1 << 16 else 1 << 16, hard)] * 2


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=20)[1]


def test_ranks_are_started_with_their_place_and_what_they_print_is_logged(
    folder: RunFolder, launcher: Launcher
) -> None:
    prints = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'OF_ALL')), flush=True)"
    launcher.link.send(start(folder, prints, prints, first=4, environment={"OF_ALL": "x"}))
    ends = sorted(launcher.until(Ended).rank for _ in range(2))
    assert ends == [4, 5]
    assert [folder.log(rank).read_text() for rank in ends] == ["4 0 x\n", "5 1 x\n"]


@pytest.mark.parametrize(
    ("ranks", "cores", "chosen", "set_to"),
    [(8, 64, None, "4"), (2, 2, None, "1"), (4, 2, None, "1"), (8, 64, "9", "9")],
)
def test_ranks_compile_in_a_few_processes_unless_the_user_chose_a_number(
    folder: RunFolder, ranks: int, cores: int, chosen: str | None, set_to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch would start up to 32 in each rank. The cores are those of the agent's host."""
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    for name in ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    environment = {} if chosen is None else {"TORCHINDUCTOR_COMPILE_THREADS": chosen, "OMP_NUM_THREADS": chosen}
    started = list[dict[str, str]]()

    def begin(rank: int, program: list[str], environment: dict[str, str], *_: Any) -> None:
        started.append(environment)
        raise OSError(2, "enough", "x")

    monkeypatch.setattr(agents, "Rank", begin)
    ours, theirs = (end.detach() for end in socket.socketpair())
    link, other = Link(ours, ours), Link(theirs, theirs)
    Agent(link)._start(work(folder, *["pass"] * ranks, environment=environment), None)
    assert [one["TORCHINDUCTOR_COMPILE_THREADS"] for one in started] == [set_to] * ranks
    assert {one["OMP_NUM_THREADS"] for one in started} == {chosen or str(max(1, cores // ranks))}
    link.close()
    other.close()


@pytest.mark.parametrize("found", [1, 2, None])
def test_a_host_with_fewer_gpus_than_ranks_is_named_before_they_start(
    folder: RunFolder, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher counts those of its own host only. None: the driver does not answer, and ranks say why."""
    started = list[int]()

    def begin(rank: int, *_: Any) -> None:
        started.append(rank)
        raise OSError(2, "enough", "x")

    monkeypatch.setattr(agents, "Rank", begin)
    monkeypatch.setattr(agents, "gpus_seen", lambda environment: None if found is None else [GPU] * found)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-b")
    ours, theirs = (end.detach() for end in socket.socketpair())
    link, other = Link(ours, ours), Link(theirs, theirs)
    agent = Agent(link)
    agent._start(replace(work(folder, "pass", "pass", first=8), gpus=True), None)
    agent.close()
    link.close()
    ends = [message for message in other.receive() if isinstance(message, Ended)]
    other.close()
    assert [end.rank for end in ends] == [8, 9] and started == ([] if found == 1 else [8, 9])
    if found == 1:
        assert all(end.cause and end.cause.code == 3 and end.cause.whole for end in ends)
        assert ends[0].cause and ends[0].cause.problem.message.startswith(
            "gpu-b: 2 ranks need one GPU each, but CUDA finds 1"
        )


def test_ranks_are_bound_to_the_numa_node_of_their_gpu(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a GPU of another node here; the third GPU is on a node that is not known."""
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("this process may use one processor only")
    first, *_, last = sorted(allowed)
    places = {"0000:1b:00.0": "0", "0000:3b:00.0": "1", "0000:9a:00.0": "-1"}
    monkeypatch.setattr(numa, "SYS", fake(tmp_path / "sys", [str(first), f"{last},4000"], places))
    monkeypatch.setattr(agents, "gpus_seen", lambda environment: [Gpu("card", place) for place in places])
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    prints = "import os; print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'], flush=True)"
    ours, theirs = (end.detach() for end in socket.socketpair())
    link, other = Link(ours, ours), Link(theirs, theirs)
    agent = Agent(link)
    agent._start(replace(work(folder, prints, prints, prints), gpus=True), None)
    for rank in agent._ranks.values():
        assert rank.process.wait(20) == 0
    agent.close()
    link.close()
    other.close()
    logs = [folder.log(rank).read_text().splitlines() for rank in range(3)]
    assert [log[-1] for log in logs] == [f"[{first}] 1", f"[{last}] 1", f"{sorted(allowed)} 1"]
    assert [len(log) for log in logs] == [2, 2, 1] and f"processors {first}," in logs[0][0]
    assert os.sched_getaffinity(0) == allowed


def test_ranks_on_gpus_write_records_of_nccl_when_they_hang(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "gpus_seen", lambda environment: [GPU])
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"):
        monkeypatch.delenv(name, raising=False)
    # A stand-in for the thread of NCCL that makes the pipe, and for what it writes.
    records = """
import os, signal
signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # with which stacks are asked for
pipe = f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{os.environ['RANK']}.pipe"
os.mkfifo(pipe)
open("ready", "w").close()
with open(pipe, "rb") as file:
    open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + os.environ["RANK"], "wb").write(file.read())
"""
    monkeypatch.chdir(folder.root)
    folder.nccl_record(6).write_text("of an earlier start")
    ours, theirs = (end.detach() for end in socket.socketpair())
    link, other = Link(ours, ours), Link(theirs, theirs)
    agent = Agent(link)
    agent._start(replace(work(folder, records, first=6), gpus=True), None)
    while not (folder.root / "ready").exists():
        time.sleep(0.01)
    assert not folder.nccl_record(6).exists()
    while not folder.nccl_record(6).exists() or not folder.nccl_record(6).read_bytes():
        agent._obey(Stacks())
        time.sleep(0.05)
    pipes = agent._pipes
    agent.close()
    link.close()
    other.close()
    assert pipes is not None and not Path(pipes).exists()


def test_an_agent_does_not_wait_for_ever_for_a_rank_that_cannot_be_killed(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process in a call of the driver about a lost GPU does not end; here one that gets no signal."""
    monkeypatch.setattr(agents, "_KILLED_S", 0.2)
    monkeypatch.setattr(agents.Rank, "kill", lambda rank: None)
    ours, theirs = (end.detach() for end in socket.socketpair())
    link, other = Link(ours, ours), Link(theirs, theirs)
    agent = Agent(link)
    agent._start(work(folder, SLEEPS), None)
    (rank,) = agent._ranks.values()
    agent.close()
    link.close()
    other.close()
    assert not agent._ranks and f"rank 0 (process {rank.process.pid})" in capfd.readouterr().err
    rank.process.kill()
    rank.process.wait()


def test_an_agent_shows_that_it_is_there_while_it_waits_for_killed_ranks(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher would take a silent agent for lost, and report its host instead of the failed data plane."""
    monkeypatch.setattr(agents, "_KILLED_S", 1.0)
    monkeypatch.setattr(agents, "BEAT_S", 0.1)
    monkeypatch.setattr(agents.Rank, "kill", lambda rank: None)
    ours, theirs = (end.detach() for end in socket.socketpair())
    link, other = Link(ours, ours), Link(theirs, theirs)
    agent, cause = Agent(link), Cause(ExitCode.HANG, Problem("no data plane"), whole=True)
    agent._start(work(folder, SLEEPS, SLEEPS, SLEEPS), None)
    ranks = [rank.process for rank in agent._ranks.values()]
    plane: Any = SimpleNamespace(look=lambda: cause, close=lambda: None)
    agent._plane = plane
    agent._look_at_plane()
    said = other.receive()
    agent.close()
    link.close()
    other.close()
    for rank in ranks:
        rank.kill()
        rank.wait()
    beats, ends = said[:-3], [message for message in said if isinstance(message, Ended)]
    assert len(beats) >= 4 and all(isinstance(message, Beats) for message in beats), "while ranks are awaited"
    assert [end.rank for end in ends] == [0, 1, 2] and {end.cause for end in ends} == {cause}
    assert all(1.0 <= end.age_s < 2.0 for end in ends), "all ranks are awaited together"


def test_ranks_that_share_a_gpu_in_a_test_need_only_one(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[int]()

    def begin(rank: int, *_: Any) -> None:
        started.append(rank)
        raise OSError(2, "enough", "x")

    monkeypatch.setattr(agents, "Rank", begin)
    monkeypatch.setattr(agents, "gpus_seen", lambda environment: [GPU])
    monkeypatch.setenv("BYTESCALE_ONE_GPU", "1")
    ours, theirs = (end.detach() for end in socket.socketpair())
    link, other = Link(ours, ours), Link(theirs, theirs)
    two = replace(work(folder, "pass", "pass", first=8), gpus=True)
    Agent(link)._start(two, None)
    assert started == [8, 9]
    Agent(link)._start(two, Tree(None, 0, "00"))
    link.close()
    other.close()
    assert started == [8, 9], "one of several hosts, which has the variable by mistake"


def test_other_hosts_are_reached_over_the_interface_of_the_route_unless_the_user_chose_one(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    started = list[dict[str, str]]()

    def begin(rank: int, program: list[str], environment: dict[str, str], *_: Any) -> None:
        started.append(environment)
        raise OSError(2, "enough", "x")

    monkeypatch.setattr(agents, "Rank", begin)
    monkeypatch.setattr(agents, "interface_towards", {"beta": "eth7"}.get)
    ours, theirs = (end.detach() for end in socket.socketpair())
    link, other = Link(ours, ours), Link(theirs, theirs)
    agent = Agent(link)
    agent._start(work(folder, "pass", peer="beta"), None)
    agent._start(work(folder, "pass", peer="beta", environment={"NCCL_SOCKET_IFNAME": "ib"}), None)
    agent._start(work(folder, "pass", peer="unreachable"), Tree(None, 0, "00"))
    agent._start(work(folder, "pass"), None)
    names = [(one.get("GLOO_SOCKET_IFNAME"), one.get("NCCL_SOCKET_IFNAME")) for one in started]
    assert names == [("eth7", "=eth7"), ("eth7", "ib"), (None, None), ("lo", "=lo")]
    link.close()
    other.close()


# The first rank writes which rank to each socket, and the others what they read, until the first has ended.
TALKS = """
import os, socket
from engine.control.link import NODE_SOCKETS, inherited
sockets = [socket.socket(fileno=descriptor) for descriptor in inherited(NODE_SOCKETS)]
assert not inherited(NODE_SOCKETS), "its children may see it"
if os.environ["LOCAL_RANK"] == "0":
    for number, one in enumerate(sockets, start=1):
        one.sendall(f"to rank {number}".encode())
else:
    (one,) = sockets
    print(one.makefile().read(), one.fileno() > 2 and not os.get_inheritable(one.fileno()))
"""


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_first_rank_of_a_node_has_a_socket_to_each_other_one(
    folder: RunFolder, launcher: Launcher, ranks: int
) -> None:
    """Only these two have it: reading ends when the other one has ended."""
    launcher.link.send(start(folder, *[TALKS] * ranks))
    assert [launcher.until(Ended).code for _ in range(ranks)] == [0] * ranks
    said = [folder.log(rank).read_text() for rank in range(ranks)]
    assert said == ["", *(f"to rank {rank} True\n" for rank in range(1, ranks))]


def test_ranks_do_not_take_the_launch_of_torchrun_for_their_own(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TORCHELASTIC_USE_AGENT_STORE no rank opens the store at which they meet."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    shows = "import os; print(os.environ['LOCAL_WORLD_SIZE'], [n for n in os.environ if n.startswith('TORCHELASTIC')])"
    with Launcher(tmp_path / "agent.txt") as launcher:
        launcher.link.send(start(folder, "pass", shows))
        assert launcher.until(Ended) and launcher.until(Ended)
    assert folder.log(1).read_text() == "2 []\n"


def test_ranks_ignore_the_signal_that_slurm_may_send_to_all_processes(folder: RunFolder, launcher: Launcher) -> None:
    launcher.link.send(start(folder, "import os; os.kill(os.getpid(), 10); print('goes on')"))
    assert launcher.until(Ended).code == 0
    assert folder.log(0).read_text() == "goes on\n"


def test_an_agent_that_cannot_reach_its_parent_is_a_cause(folder: RunFolder, launcher: Launcher) -> None:
    """No rank starts: it would wait for the others without an end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher.link.send(start(folder, SLEEPS, SLEEPS, tree=Tree(("127.0.0.1", port), 0, "00")))
    ends = [launcher.until(Ended), launcher.until(Ended)]
    causes = [one.cause for one in ends if one.cause is not None]
    assert [one.rank for one in ends] == [0, 1] and [one.code for one in causes] == [3, 3]
    assert all(f"127.0.0.1:{port}" in one.problem.message and one.problem.hint for one in causes)
    assert ranks_of(launcher, 0) == []


@pytest.mark.parametrize("children", [0, 1])
def test_an_interface_that_the_host_does_not_have_is_a_cause(
    folder: RunFolder, launcher: Launcher, children: int
) -> None:
    """The agent has not joined its parent, and is ready for the next start."""
    secret = bytes(32)
    with Listener("127.0.0.1", secret) as parent:
        tree = Tree(("127.0.0.1", parent.port), children, secret.hex())
        launcher.link.send(start(folder, SLEEPS, tree=tree, environment={"GLOO_SOCKET_IFNAME": "eth77"}))
        cause = launcher.until(Ended).cause
        assert cause is not None and cause.code == 3 and "eth77" in cause.problem.message
        launcher.link.send(Again())
        launcher.until(Hello)
        assert not parent.links()


def test_a_host_without_the_run_folder_is_a_cause(tmp_path: Path, launcher: Launcher) -> None:
    missing = RunFolder(tmp_path / "not shared")
    launcher.link.send(start(missing, "pass"))
    cause = launcher.until(Ended).cause
    assert cause is not None and cause.code == 3 and str(missing.log(0)) in cause.problem.message


def test_a_cause_has_its_age(folder: RunFolder, launcher: Launcher) -> None:
    """The clocks of hosts differ, so times would not tell which rank failed first."""
    cause = {"code": 4, "message": "gone", "key": None, "hint": None}
    fails = (
        f"import json, time; cause = {cause!r} | dict(time=time.time() - 100)\n"
        f"open({str(folder.error(0))!r}, 'w').write(json.dumps(cause)); print('last words'); raise SystemExit(4)"
    )
    launcher.link.send(start(folder, fails))
    ended = launcher.until(Ended)
    assert ended.cause is not None and (ended.cause.code, ended.cause.problem) == (4, Problem("gone"))
    assert 100 <= ended.age_s < 130 and ended.said == "last words"


def test_beats_say_where_ranks_are_and_whether_they_are_stopped(folder: RunFolder, launcher: Launcher) -> None:
    launcher.link.send(start(folder, real_rank(folder), SLEEPS))

    def beats() -> Mapping[int, Beat]:
        return launcher.until(Beats).ranks

    while (now := beats())[0].at is None:
        pass
    assert now[0].at == (3, "forward", 1) and now[1].at is None
    first, later = beats()[0].age_s, beats()[0].age_s
    assert later - first >= 0.9, "seconds since it is there"
    silent = max(ranks_of(launcher, 2), key=lambda process: process.pid)
    silent.suspend()
    while not beats()[1].stopped:
        pass
    silent.resume()
    while beats()[1].stopped:
        pass


def test_beats_say_how_long_the_step_takes(folder: RunFolder, launcher: Launcher) -> None:
    """By its plan. The last finished step is measured, from what the plan says to `log`: without its checkpoint."""
    steps = """progress.report("plan", step=3); time.sleep(0.5)
    progress.tell_planned(2.5); control.largest(1); time.sleep(1); progress.report("log"); control.largest(1)
    control.collect("it", 1)  # which is not counted, as it waits for nobody
    progress.report("save"); time.sleep(2)
    progress.report("plan", step=4); progress.tell_planned(7.5)"""
    program = real_rank(folder).replace('progress.report("forward", 1, step=3)', steps)
    launcher.link.send(start(folder, program))
    beats = list[Beat]()
    while not beats or beats[-1].planned_s != 7.5:
        beats.append(launcher.until(Beats).ranks[0])
    assert beats[0].measured is None and beats[-1].measured is not None
    step, planned_s, measured_s = beats[-1].measured
    assert (step, planned_s) == (3, 2.5) and 1 <= measured_s < 2
    assert beats[-1].at == (4, "plan", 0) and beats[-1].entered == 2


def test_a_rank_that_is_asked_to_stop_may_save(folder: RunFolder, launcher: Launcher) -> None:
    launcher.link.send(start(folder, f"import time; time.sleep(0.3)\n{real_rank(folder)}"))
    launcher.link.send(Stop())
    assert launcher.until(Ended).code == 75 and (folder.root / "saved").exists()


def test_what_an_ended_rank_has_started_is_killed(folder: RunFolder, launcher: Launcher) -> None:
    launcher.link.send(start(folder, CHILD))
    assert launcher.until(Ended).code == 0
    pid = int(folder.log(0).read_text())
    assert not psutil.pid_exists(pid) or gone([psutil.Process(pid)])


def test_a_kill_ends_ranks_and_what_they_have_started(folder: RunFolder, launcher: Launcher) -> None:
    launcher.link.send(start(folder, f"{CHILD}; time.sleep(60)"))
    while not folder.log(0).exists() or not folder.log(0).read_text().endswith("\n"):
        time.sleep(0.01)
    child = psutil.Process(int(folder.log(0).read_text()))
    launcher.link.send(Kill())
    assert launcher.until(Ended).code == -signal.SIGKILL
    assert gone([child])


@pytest.mark.parametrize("state", ["runs", "stopped"])
def test_when_the_launcher_is_gone_ranks_are_killed(folder: RunFolder, launcher: Launcher, state: str) -> None:
    launcher.link.send(start(folder, SLEEPS, f"{CHILD}; time.sleep(60)"))
    ranks = ranks_of(launcher, 2)
    if state == "stopped":
        for rank in ranks:
            rank.suspend()
    launcher.hang_up()
    launcher.process.wait(20)
    assert gone(ranks)


def test_when_the_agent_is_killed_ranks_end_though_they_are_stopped(folder: RunFolder, launcher: Launcher) -> None:
    launcher.link.send(start(folder, SLEEPS, SLEEPS))
    ranks = ranks_of(launcher, 2)
    ranks[0].suspend()
    launcher.process.kill()
    assert gone(ranks)


def test_a_silent_launcher_on_another_host_is_taken_for_lost(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its network may be cut. On this machine it may be stopped, which is no reason."""
    monkeypatch.setattr(agents, "SILENCE_S", 1.0)
    lasted = dict[bool, float]()
    for alone in (False, True):
        ours, theirs = (end.detach() for end in socket.socketpair())
        link, other = Link(ours, ours), Link(theirs, theirs)
        agent, began = Agent(link), time.monotonic()
        other.send(start(folder, SLEEPS, alone=alone))
        threading.Timer(3, other.close).start()
        assert agent.run() == 124
        lasted[alone] = time.monotonic() - began
        agent.close()
        link.close()
    assert 1 <= lasted[False] < 3 <= lasted[True]


@contextmanager
def linked() -> Iterator[tuple[Agent, Link]]:
    """An agent in this process, and the launcher's end of its link, which the test closes."""
    ours, theirs = (end.detach() for end in socket.socketpair())
    link, other = Link(ours, ours), Link(theirs, theirs)
    agent = Agent(link)
    yield agent, other
    agent.close()
    link.close()


@pytest.mark.parametrize(("ends", "code"), [([End(75)], 75), ([], 124)])
def test_it_ends_with_the_named_code_though_the_launcher_is_gone(ends: list[End], code: int) -> None:
    """Without one, as after a loss."""
    with linked() as (agent, other):
        agent._beaten = -math.inf  # a beat is due
        for message in ends:
            other.send(message)
        other.close()
        assert agent.run() == code


def test_what_a_scheduler_has_asked_between_two_starts_is_told_in_the_next() -> None:
    with linked() as (agent, other):
        agent.pass_on(signal.SIGTERM)
        agent._report()
        assert other.receive() == [Asked(signal.SIGTERM)]
        agent.begin()  # it drops what it reads before the agent says hello
        agent._report()
        agent._report()
        assert other.receive() == [Hello(), Asked(signal.SIGTERM)]
        other.close()


def test_signals_of_a_terminal_or_a_scheduler_do_not_end_it(folder: RunFolder, launcher: Launcher) -> None:
    """The launcher gets them too, and decides. Ranks do not inherit that signals are ignored."""
    prints = "import signal; print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)"
    for number in STOP_SIGNALS:
        os.kill(launcher.process.pid, number)
    launcher.link.send(start(folder, prints))
    assert launcher.until(Ended).code == 0
    assert folder.log(0).read_text() == "True\n"


def test_descriptors_do_not_grow_with_the_ranks_that_have_ended(folder: RunFolder, launcher: Launcher) -> None:
    process = psutil.Process(launcher.process.pid)
    before = process.num_fds()
    launcher.link.send(start(folder, *["pass"] * 4))
    for _ in range(4):
        launcher.until(Ended)
    launcher.until(Beats)
    assert process.num_fds() == before + 1, "that of the selector of the branch"


def test_a_stopped_agent_and_its_ranks_end_with_what_has_started_it(folder: RunFolder) -> None:
    """As with the sshd of a connection that ends. Nobody else could end them: the launcher is on another host."""
    # Without the second command, sh would become the first.
    started = f"{sys.executable} -m engine.launch.agents.agent; true"
    with subprocess.Popen(["sh", "-c", started], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as connection:
        assert connection.stdin is not None and connection.stdout is not None
        while b"hello" not in connection.stdout.readline():
            pass
        connection.stdin.write(line_of(start(folder, SLEEPS)))
        connection.stdin.flush()
        shell = psutil.Process(connection.pid)
        while len(family := shell.children(recursive=True)) < 2:
            time.sleep(0.01)
        (agent,) = shell.children()
        agent.suspend()
        connection.kill()
        assert gone(family)


def test_ranks_are_shown_that_their_agent_is_there(folder: RunFolder, launcher: Launcher) -> None:
    waits = "from engine.control.link import Link\nfrom engine.control.protocol import Alive\nlink = Link.to_agent()\n"
    waits += "while Alive() not in link.receive():\n    pass"
    began = time.monotonic()
    launcher.link.send(start(folder, waits))
    assert launcher.until(Ended).code == 0 and time.monotonic() - began < SILENCE_S


def test_what_is_printed_is_not_among_the_messages(tmp_path: Path) -> None:
    """A shell that greets without a line break would hide the first message."""
    greets = f"printf 'Welcome'; exec {sys.executable} -m engine.launch.agents.agent"
    with subprocess.Popen(["sh", "-c", greets], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"Welcome\n"
        assert message_of(process.stdout.readline()) == Hello()
        process.stdin.close()


def test_an_agent_starts_without_what_is_heavy() -> None:
    """All hosts answer before any rank starts."""
    program = "import sys, engine.launch.agents.agent; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) & {"torch", "deepspeed", "numpy", "hydra", "pydantic"} == set()
