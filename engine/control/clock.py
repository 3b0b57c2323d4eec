"""A clock for time limits, which must not count the time in which the process that waits was itself stopped."""

from __future__ import annotations

import time
from collections.abc import Callable

_MOST_S = 2.0  # between two readings of a process that runs


class AwakeClock:
    """Counts the seconds in which this process runs. Read it at least once a second.

    It stands still while the process is stopped, by Ctrl-Z or by a scheduler that suspends a job: then other processes
    have not been silent, they could not be heard.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now` gives the time in seconds."""
        self._now = now
        self._last, self._awake = now(), 0.0

    def __call__(self) -> float:
        """Return the seconds since the clock was made."""
        now = self._now()
        self._awake += min(now - self._last, _MOST_S)
        self._last = now
        return self._awake
