"""Timing on all ranks at once: every rank runs the same things in the same order, repeated in turns.

In turns, so that a slow minute of the machine spoils a little of everything and not one point wholly.
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

from engine.hardware.measured import Timing
from engine.trainer.groups import Groups

Run = Callable[[], tuple[float, float]]  # forward and backward of something, seconds; or one time and 0
_MOST, _FEWEST = 25, 2  # repetitions
QUANTILE = 0.25  # of repetitions: what others do on the machine makes times longer, never shorter


class Stopwatch:
    """Times what a device does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> float:
        """Return the time, once the device has done all it was given."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def interleaved(runs: Sequence[Run], groups: Groups, seconds: float, too_long_s: float = math.inf) -> list[Timing]:
    """Return the timings of `runs`, which come in rising cost, within about `seconds`.

    The list ends with the first that takes longer than `too_long_s`, or before it: those that follow take longer still.
    """
    first = _first_times(runs, groups, too_long_s)
    repeats = [int(np.clip(seconds / len(first) / s, _FEWEST, _MOST)) for s in first]
    samples: list[list[tuple[float, float]]] = [[] for _ in first]
    began = time.monotonic()
    for turn in range(max(repeats)):
        if turn >= _FEWEST and max(gather(time.monotonic() - began, groups)) > seconds:
            break
        for run, taken, repeat in zip(runs, samples, repeats, strict=False):
            if turn < repeat:
                dist.barrier(groups.control)
                taken.append(run())
    return [_timing(of_ranks) for of_ranks in zip(*gather(samples, groups), strict=True)]


def gather(value: Any, groups: Groups) -> list[Any]:
    """Return every rank's value."""
    values: list[Any] = [None] * groups.world
    dist.all_gather_object(values, value, group=groups.control)
    return values


def _first_times(runs: Sequence[Run], groups: Groups, too_long_s: float) -> list[float]:
    """Run each twice, the first time to warm up, and return the slowest rank's times."""
    times: list[float] = []
    for run in runs:
        dist.barrier(groups.control)
        once = max(gather(sum(run()), groups))
        times.append(once if once > 1 else max(gather(sum(run()), groups)))
        if times[-1] > too_long_s:
            break
    return times


def _timing(samples: Sequence[Sequence[tuple[float, float]]]) -> Timing:
    """Return the mean over ranks of the lower quartiles of [ranks, repeats, 2] times."""
    taken: NDArray[np.float64] = np.array(samples, dtype=np.float64)
    totals = taken.sum(2)
    forward, backward = np.quantile(taken, QUANTILE, axis=1).mean(0)
    # Quantiles of parts do not add up to that of their sum: the parts share it in their own proportion.
    scale = np.quantile(totals, QUANTILE, axis=1).mean() / (forward + backward)
    spread = float((np.median(totals, axis=1) / totals.min(1)).mean() - 1)
    return Timing(float(forward * scale), float(backward * scale), spread)
