"""Reads documents in several processes: one per core, each with a part of the work at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from engine.errors import DataError
from engine.safe_path import starting_safely

T = TypeVar("T")
R = TypeVar("R")


def in_processes(work: Callable[[T], R], items: Sequence[T], workers: int, hint: str) -> Iterator[R]:
    """Yield `work(item)` of each item, in order. `work` and the items are pickled.

    Raises DataError with `hint` if a process is killed, and any error of `work`.
    """
    workers = min(len(items), workers)
    if workers < 2:  # starting processes takes seconds
        yield from map(work, items)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads of numpy
    try:
        with ProcessPoolExecutor(workers, context, initializer=_ignore_interrupts) as pool:
            try:
                with starting_safely():
                    results = pool.map(work, items)  # starts all workers
                yield from results
            finally:
                pool.shutdown(wait=False, cancel_futures=True)  # after an error, start nothing more
    except BrokenProcessPool as error:
        message = "a process that read documents was killed, possibly by the out-of-memory killer"
        raise DataError(message, hint=hint) from error


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ignore_interrupts() -> None:
    """Leave Ctrl-C to the parent process, which then terminates its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
