"""Timing on all ranks at once: every rank runs the same list in the same order, and repeats the whole list.

Repetitions are interleaved so that a slow minute of the machine adds a little to all results instead of spoiling one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from engine.control import progress
from engine.hardware.measured import Timing
from engine.parallel.groups import Groups

Run = Callable[[], tuple[float, float]]  # runs something; returns (forward, backward) in seconds, or (seconds, 0)
_MOST, _FEWEST = 25, 3  # repetitions of each run; a median of two would be their mean


class Stopwatch:
    """A clock that first waits for the device to finish its work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        """The time in seconds after all work queued on the device is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def timed(work: Callable[[], Any], device: torch.device) -> Run:
    """Make a function that runs `work` and returns its time on the device as (seconds, 0.0)."""
    watch = Stopwatch(device)

    def run() -> tuple[float, float]:
        began = watch.now()
        work()
        return watch.now() - began, 0.0

    return run


def interleaved(runs: Sequence[Run], groups: Groups, seconds: float, too_long_s: float = math.inf) -> list[Timing]:
    """Time `runs` on all ranks for about `seconds`, each at least three times; return a timing for each.

    The list ends with the first run that takes longer than `too_long_s`. If that is given, `runs` must be sorted by
    increasing cost, because the runs after it are not timed.
    """
    # Each runs twice, first to warm up (once if over 1 s); the slowest rank's time decides how often it is repeated.
    first: list[float] = []
    for number, run in enumerate(runs):
        progress.report("forward", number)  # or the launcher would stop the ranks as if they were stuck
        dist.barrier()
        (once,) = groups.control.largest(sum(run()))
        first.append(once if once > 1 else groups.control.largest(sum(run()))[0])
        if first[-1] > too_long_s:
            break
    # Equal time for each run: short ones are noisier and are repeated more often.
    repeats = [int(np.clip(seconds / len(first) / s, _FEWEST, _MOST)) for s in first]
    samples: list[list[tuple[float, float]]] = [[] for _ in first]
    began = time.monotonic()
    for turn in range(max(repeats)):
        if turn >= _FEWEST and groups.control.largest(time.monotonic() - began)[0] > seconds:
            break
        for number, (run, taken, repeat) in enumerate(zip(runs, samples, repeats, strict=False)):
            if turn < repeat:
                progress.report("forward", (turn + 1) * len(runs) + number)
                dist.barrier()
                taken.append(run())
    return [timing_of(of_ranks) for of_ranks in zip(*groups.control.gather(samples), strict=True)]


def timing_of(samples: Sequence[Sequence[tuple[float, float]]]) -> Timing:
    """Summarise times [ranks, repeats, 2] (forward, backward): median over repeats, then mean over ranks.

    Also computes the spread of the repeats. A lower quantile would be too short, because a step is the sum of all its
    micro-batches, including those that wait for other ranks or are interrupted. With few repeats, one slow
    repeat would dominate a mean.
    """
    taken: NDArray[np.float64] = np.array(samples, dtype=np.float64)
    totals = taken.sum(2)
    forward, backward = np.median(taken, axis=1).mean(0)
    typical = np.median(totals, axis=1)
    # Medians of forward and backward do not add up to the median of their sum: scale both to it.
    scale = typical.mean() / (forward + backward)
    spread = float((typical / totals.min(1)).mean() - 1)
    return Timing(float(forward * scale), float(backward * scale), spread)
