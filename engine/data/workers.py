"""Reads documents in several processes: one per core, each with a part of the work at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from engine.control.processes import StopWatch, end_with_parent, is_stopped
from engine.errors import BytescaleError, DataError, ExitCode
from engine.safe_path import starting_safely

T = TypeVar("T")
R = TypeVar("R")

_LOOK_S = 0.2  # between two checks of the processes


class StoppedError(BytescaleError):
    """A signal has stopped a process that reads documents."""

    code = ExitCode.HANG


def in_processes(work: Callable[[T], R], items: Sequence[T], workers: int, hint: str) -> Iterator[R]:
    """Yield `work(item)` of each item, in order. `work` and the items are pickled.

    Raises DataError with `hint` if a process is killed, StoppedError if a signal has stopped one for some seconds, and
    any error of `work`. No process replaces another: `work` may have written a part of its results.
    """
    workers = min(len(items), workers)
    if workers < 2:  # starting processes takes seconds
        yield from map(work, items)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads of numpy
    before = set(multiprocessing.active_children())
    try:
        with ProcessPoolExecutor(workers, context, initializer=_begin) as pool:
            try:
                with starting_safely():
                    results = deque(pool.submit(work, item) for item in items)  # starts all workers
                watches = {child: StopWatch() for child in set(multiprocessing.active_children()) - before}
                while results:
                    result = results.popleft()  # so that its memory is freed after use
                    while not wait([result], _LOOK_S).done:
                        for child, watch in watches.items():
                            if watch.note(is_stopped(child.pid or 0)):
                                child.kill()
                                message = f"a process that read documents, {child.pid}, was stopped by a signal"
                                raise StoppedError(message, hint="run the same command again")
                    yield result.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # after an error, start nothing more
    except BrokenProcessPool as error:
        message = "a process that read documents was killed, possibly by the out-of-memory killer"
        raise DataError(message, hint=hint) from error


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin() -> None:
    """Leave Ctrl-C to the parent process, which then terminates its workers; end with it in any case."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
