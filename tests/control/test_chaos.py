"""Faults happen when a rank begins the phase for which they are planted, and to that rank alone."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from engine.control import progress
from engine.control.chaos import Chaos, Fault, plant

WALK = """
import sys
from pathlib import Path
from engine.control import progress
from engine.control.chaos import Chaos
progress.allow_chaos(Chaos(Path(sys.argv[1]), int(sys.argv[2])).reach)
for step in (1, 2, 3):
    progress.report("plan", step=step)
    for phase in ("forward", "backward", "reduce"):
        print(step, phase, flush=True)
        progress.report(phase)
    progress.reach("rename")
"""


def walk(folder: Path, rank: int = 0) -> subprocess.Popen[str]:
    """Start a rank that passes the phases of three steps, and prints each before it begins."""
    return subprocess.Popen([sys.executable, "-c", WALK, str(folder), str(rank)], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("fault", "last"),
    [
        (Fault("kill-rank"), ""),
        (Fault("kill-rank", at="backward"), "1 backward"),
        (Fault("kill-rank", at="backward", step=2), "2 backward"),
        (Fault("kill-rank", at="rename", step=2), "2 reduce"),
        (Fault("kill-rank", step=3), "2 reduce"),
    ],
)
def test_a_rank_is_killed_at_the_exact_moment(tmp_path: Path, fault: Fault, last: str) -> None:
    path = plant(tmp_path, 0, fault)
    with walk(tmp_path) as rank:
        said, _ = rank.communicate()
    assert rank.returncode == -signal.SIGKILL and (said.splitlines() or [""])[-1] == last
    assert not path.exists(), "the next start is not harmed"
    (happened,) = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert (happened["fault"], happened["rank"]) == ("kill-rank", 0) and time.time() - happened["time"] < 60


def test_other_ranks_are_left_alone(tmp_path: Path) -> None:
    plant(tmp_path, 1, Fault("kill-rank"))
    with walk(tmp_path) as rank:
        assert len(rank.communicate()[0].splitlines()) == 9 and rank.returncode == 0


def test_a_fault_happens_as_often_as_it_is_planted_for(tmp_path: Path) -> None:
    plant(tmp_path, 0, Fault("kill-rank", at="forward", step=2, times=2))
    codes = []
    for _ in range(3):
        with walk(tmp_path) as rank:
            rank.communicate()
        codes.append(rank.returncode)
    assert codes == [-9, -9, 0]


def test_a_rank_is_stopped(tmp_path: Path) -> None:
    plant(tmp_path, 0, Fault("stop-rank", at="backward"))
    with walk(tmp_path) as rank:
        process = psutil.Process(rank.pid)
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        process.resume()
        assert len(rank.communicate()[0].splitlines()) == 9 and rank.returncode == 0


def test_a_slow_rank_takes_longer_in_its_passes_until_that_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, chaos = 100.0, Chaos(tmp_path, 0)
    slept = list[float]()
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(time, "sleep", slept.append)

    def step() -> list[float]:
        nonlocal now
        slept.clear()
        for phase, seconds in (("data", 1), ("forward", 10), ("backward", 20), ("reduce", 5), ("log", 1)):
            chaos.reach(1, phase)
            now += seconds / 2
            chaos.reach(1, "write")  # of a checkpoint in the background: no phase of the step ends there
            now += seconds / 2
        return [one for one in slept if one]

    assert step() == []
    for factor in (2.0, 3.0):
        plant(tmp_path, 0, Fault("slow-rank", factor=factor))
        assert step() == [(factor - 1) * seconds for seconds in (1, 10, 20)]
    plant(tmp_path, 0, Fault("slow-rank", factor=1.0))
    assert step() == []


def test_two_threads_trigger_each_fault_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step and the checkpoint that is written meanwhile reach their phases at the same time."""
    happened = list[str]()
    monkeypatch.setattr("engine.control.chaos._do", happened.append)
    chaos, rounds = Chaos(tmp_path, 0), 150
    together = threading.Barrier(2)

    def walks(phase: str) -> None:
        for _ in range(rounds):
            if together.wait() == 0:
                plant(tmp_path, 0, Fault("kill-rank"))
            together.wait()
            try:
                chaos.reach(1, phase)
            except BaseException:
                together.abort()
                raise

    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(walks, phase) for phase in ("forward", "write")]
    assert [end.exception() for end in ends] == [None, None]
    assert len(happened) == len((tmp_path / "log.jsonl").read_text().splitlines()) == rounds


def test_connections_are_cut_and_the_link_to_the_agent_is_not(tmp_path: Path) -> None:
    plant(tmp_path, 0, Fault("cut-link"))
    near, far = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, near, far:
        with socket.create_connection(server.getsockname()[:2]) as client, server.accept()[0] as other:
            Chaos(tmp_path, 0).reach(1, "forward")
            assert other.recv(1) == b"" and client.recv(1) == b""
        near.send(b"x")
        assert far.recv(1) == b"x"


def test_a_run_that_does_not_allow_it_looks_for_nothing(tmp_path: Path) -> None:
    assert progress._place.chaos is None
    plant(tmp_path, 0, Fault("kill-rank"))
    progress.report("forward", 1, step=1)
    progress.reach("rename")
