"""Processes that help another one: they end with it, and one that a signal has stopped is noticed."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from engine.control.clock import AwakeClock

STOPPED_S = 3.0  # that a process may be stopped by a signal
_PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent ends
_PR_SET_CHILD_SUBREAPER = 36  # prctl(2): who becomes the parent of orphans below it
_LOOK_S = 0.01
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_prctl = ctypes.CDLL(None).prctl


def end_with_parent() -> None:
    """Let the system kill this process when the thread that has started it ends, also while a signal has stopped it.

    Nothing happens if it has ended before this call.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def continue_without_parent() -> None:
    """Let the system continue this process, if a signal has stopped it, when the thread that has started it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def adopt_orphans() -> None:
    """Make this process the parent of each process below it whose own parent ends, so that none gets away."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Return the processes whose parent is this one."""
    found = list[int]()
    for thread in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended; another one is the parent now
            found += map(int, thread.read_text(encoding="ascii").split())
    return found


def kill_children() -> None:
    """Kill all processes below this one, which must `adopt_orphans`, and wait for them."""
    while True:
        for pid in children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Those that a child had started are children now.
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def kill_session(session: int) -> None:
    """Kill all processes of a session, and wait until none is left that runs."""
    while found := [pid for pid in map(int, _processes()) if _is_in(pid, session)]:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def _processes() -> list[str]:
    return [path.name for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _is_in(pid: int, session: int) -> bool:
    """Return whether a process is of a session, and has not ended."""
    state = _stat(pid)
    return len(state) > 3 and state[3] == str(session) and state[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    """Return the fields of a process from its state on (proc_pid_stat(5)); none if it is gone, or there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (OSError, UnicodeError):
        return []


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has used, in seconds, with a resolution of 10 ms; 0 if it is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) * _TICK_S if fields else 0.0


def start_of(pid: int) -> int | None:
    """Return when a process has started, in clock ticks since the host did; None if it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process. A debugger does not count: someone is looking."""
    return _stat(pid)[:1] == ["T"]


class StopWatch:
    """Notices that a signal has stopped a process for some seconds in which this process was not stopped itself."""

    def __init__(self, clock: AwakeClock | None = None) -> None:
        """By default the watch has a separate clock."""
        self._clock = clock or AwakeClock()
        self._since: float | None = None

    def note(self, stopped: bool) -> bool:
        """Note whether the process is stopped now, and return `expired`. Call it at least once a second."""
        now = self._clock()
        if not stopped:
            self._since = None
        elif self._since is None:
            self._since = now
        return self.expired

    @property
    def expired(self) -> bool:
        """Whether the process has been stopped for STOPPED_S."""
        return self._since is not None and self._clock() - self._since > STOPPED_S
