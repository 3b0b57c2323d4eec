"""Writes the records of each step (ledger, metrics) in a thread, so that the next step does not wait for the disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

MOST = 4  # steps that may be behind: a few, since a killed process loses them
_LEAVE_S = 2.0  # a disk that hangs delays the error of a run by at most this time


class Journal:
    """Runs one function after another in a thread, in order. After one has failed, none is run.

    On a network file system, each fsync of a step takes 5 to 30 ms. What is added is durable after `wait`, which must
    come before a checkpoint is written: no checkpoint may be newer than the records of its steps.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most, self._failed = most, False
        self._thread = ThreadPoolExecutor(1, "journal")
        self._behind = deque[Future[None]]()

    def add(self, write: Callable[[], None]) -> None:
        """Run `write` in the thread; waits while `most` others are behind. Raises the error of one that has failed."""
        self._take(self._most - 1)
        self._behind.append(self._thread.submit(self._run, write))

    def check(self) -> None:
        """Raise the error of a function that has failed."""
        self._take(len(self._behind))

    def wait(self) -> None:
        """Wait until all functions have returned. Raises the error of one that has failed, also if called again."""
        self._take(0)

    def leave(self) -> None:
        """Wait a short time for the functions that are left, when the run ends with another error. Raises nothing."""
        wait(self._behind, _LEAVE_S)

    def _take(self, most: int) -> None:
        while self._behind and (len(self._behind) > most or self._behind[0].done()):
            self._behind[0].result()
            self._behind.popleft()

    def _run(self, write: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            write()
        except BaseException:
            self._failed = True
            raise
