"""When cuDNN's faster kernel is worth the execution plan that it needs for a new shape.

cuDNN builds a plan for every new shape, which takes about 70 ms on an H200, and PyTorch keeps one cache of plans per
thread. Most of HDP's shapes come once. So a shape uses the varlen kernel until the time that cuDNN would have saved on
all its calls reaches the time of building the plan (the ski-rental rule): whatever comes next, the time lost is less
than twice that of the best decision in hindsight.

PyTorch gives cuDNN dense batches only, if keys are shared by query heads. In a call with sequences of several lengths,
each run of equal ones is such a batch, and needs a separate kernel call. Where a run saves less than this costs, it is
not counted.

The forward and the backward pass have separate plans, as do the threads that run them: autograd's thread runs the
backward pass, and the forward pass of recomputed layers. All layers of a model share their shapes.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch

from engine.attention.kernels.call import Call

MOST_SHAPES = 4096  # shapes that a thread remembers; the one that was used least recently is forgotten first


class PlanCosts(NamedTuple):
    """The times that decide, in seconds."""

    # Building one plan: `plan_build_s` of the calibration.
    build_s: float
    # Extra cost of a separate kernel call: launches, and a copy of the results. An estimate, not measured.
    split_s: float = 5e-5
    # What cuDNN saves against the varlen kernel, per FLOP. Measured on one H200 at 64K tokens, head size 128:
    # 1 / 361 - 1 / 624 s per TFLOP forward, 1 / 320 - 1 / 536 backward (benchmarks/RESULTS.md).
    saved_s_per_flop: float = 1.2e-15


class Heads(NamedTuple):
    """The heads of a call."""

    query: int
    kv: int
    size: int  # elements of a head
    dtype: torch.dtype


class Run(NamedTuple):
    """Consecutive sequences of a call that have the same numbers of queries and of keys."""

    sequences: int
    queries: int  # of each sequence
    keys: int


class Shape(NamedTuple):
    """What an execution plan is built for."""

    run: Run
    causal: bool
    backward: bool
    heads: Heads

    @property
    def pairs(self) -> float:
        """(query, key) pairs of a call."""
        return self.run.sequences * self.run.queries * self.run.keys / (2 if self.causal else 1)

    @property
    def flops(self) -> float:
        """FLOPs of a call: two products of a multiply-add per (query, key) pair, five in the backward pass."""
        return 2 * (5 if self.backward else 2) * self.pairs * self.heads.query * self.heads.size


class CudnnRun(NamedTuple):
    """The sequences start .. stop - 1 of a call, a run on which cuDNN saves time once it has a plan."""

    start: int
    stop: int
    shape: Shape
    saved_s: float  # in a call


class Plans(threading.local):
    """Decides call by call whether to use cuDNN, separately in each thread."""

    def __init__(self, costs: PlanCosts, most_shapes: int = MOST_SHAPES) -> None:
        self.costs, self._most_shapes = costs, most_shapes
        self._saved: dict[Shape, float] = {}  # seconds that cuDNN saves on the calls so far; most recently used last

    def use_cudnn(self, one: CudnnRun) -> bool:
        """Count a call, and return whether it uses cuDNN. Once true for a shape, it stays true until forgotten."""
        saved = self._saved.pop(one.shape, 0.0)
        if saved < self.costs.build_s:
            saved += one.saved_s
        self._saved[one.shape] = saved
        if len(self._saved) > self._most_shapes:
            del self._saved[next(iter(self._saved))]
        return saved >= self.costs.build_s


@lru_cache(maxsize=1024)
def cudnn_runs(call: Call, backward: bool, heads: Heads, costs: PlanCosts) -> tuple[CudnnRun, ...]:
    """Return the runs of a call that cuDNN computes correctly, and on which it saves time.

    Cached, because all layers of a micro-batch make the same calls.
    """
    found, start = [], 0
    runs_of_call = runs(call)
    split_s = costs.split_s if len(runs_of_call) > 1 else 0.0
    for run in runs_of_call:
        shape = Shape(run, call.causal, backward, heads)
        saved_s = shape.flops * costs.saved_s_per_flop - split_s
        if saved_s > 0 and cudnn_computes(run, call.causal):
            found.append(CudnnRun(start, start + run.sequences, shape, saved_s))
        start += run.sequences
    return tuple(found)


def runs(call: Call) -> list[Run]:
    """Divide the sequences of a call into runs."""
    sizes = ((rows.stop - rows.start, keys.stop - keys.start) for rows, keys in call.sequences())
    return [Run(len(list(same)), *size) for size, same in groupby(sizes)]


def cudnn_computes(run: Run, causal: bool) -> bool:
    """Return whether cuDNN computes a run correctly, as a dense batch.

    If the call is not causal, cuDNN's backward pass returns NaN on Hopper (seen with 9.19; reported up to 9.26): dq for
    keys = 64 modulo 128 and a log-sum-exp below -88.7 (pytorch#196678, cudnn-frontend#628); dk and dv for one query and
    a negative log-sum-exp (cudnn-frontend#1072). It rejects causal calls of one query and one key. We exclude all calls
    with fewer than 64 queries, half a tile of the kernel.
    """
    return run.queries >= 64 and (causal or run.keys % 128 != 64)
