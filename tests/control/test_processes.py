"""A process that a signal has stopped is noticed after some seconds in which the one that watches has run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.control.clock import AwakeClock
from engine.control.processes import STOPPED_S, StopWatch, children, kill_session


def test_a_process_counts_as_stopped_after_some_seconds_without_a_break() -> None:
    now = [0.0]
    watch = StopWatch(AwakeClock(lambda: now[0]))

    def noted(stopped: bool, seconds: float) -> bool:
        now[0] += seconds
        return watch.note(stopped)

    assert not any(noted(True, 1) for _ in range(int(STOPPED_S) + 1))
    assert noted(True, 1) and watch.expired
    assert not noted(False, 1) and not watch.expired
    assert not noted(True, 1)
    assert not noted(True, 3600), "this process was stopped itself, so the clock counts two seconds"
    assert noted(True, 2) and watch.expired


def test_all_processes_of_a_session_are_killed() -> None:
    """Also those whose parent has ended."""
    command = ["/bin/sh", "-c", "sleep 60 & (sleep 60 &) ; echo up; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout is not None and leader.stdout.readline() == b"up\n"
        kill_session(leader.pid)
        assert leader.wait() == -signal.SIGKILL
        assert leader.stdout.read() == b"", "a process that has the other end of the pipe is left"


def test_a_thread_that_ends_meanwhile_does_not_hide_the_children_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [self / "0" / "children", *glob(self, pattern)])
    with subprocess.Popen(["sleep", "60"]) as child:
        found = children()
        child.kill()
    assert child.pid in found


def test_an_ancestor_kills_orphans_of_other_sessions_too() -> None:
    code = (
        "import os, subprocess\n"
        "from engine.control.processes import adopt_orphans, children, kill_children\n"
        "adopt_orphans()\n"
        'start = \'import subprocess; subprocess.Popen(["sleep", "60"], start_new_session=True)\'\n'
        "subprocess.run([sys.executable, '-c', start], check=True)\n"
        "assert len(children()) == 1, children()\n"
        "kill_children()\n"
        "assert not children()\n"
    )
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], timeout=60)
    assert done.returncode == 0
