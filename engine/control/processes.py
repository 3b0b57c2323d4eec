"""Processes that help another one: they end with it, and one that a signal has stopped is noticed."""

from __future__ import annotations

import ctypes
import signal
from pathlib import Path

from engine.control.clock import AwakeClock

STOPPED_S = 3.0  # that a process may be stopped by a signal
_PR_SET_PDEATHSIG = 1  # prctl(2): the signal that a process gets when its parent ends
_prctl = ctypes.CDLL(None).prctl


def end_with_parent() -> None:
    """Let the system kill this process when the thread that has started it ends, also while a signal has stopped it.

    Nothing happens if it has ended before this call.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped a process. A debugger does not count: someone is looking."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:  # it has ended, or there is no /proc
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


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
