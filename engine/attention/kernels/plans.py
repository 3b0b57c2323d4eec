"""When cuDNN's faster kernel is worth the execution plan that it needs for a new shape.

cuDNN builds a plan for every new shape, which takes about 70 ms on an H200, and PyTorch keeps one cache of plans per
thread. Most of HDP's shapes come once. So a shape uses the varlen kernel until the time that cuDNN would have saved on
all its calls reaches the time of building the plan (the ski-rental rule): whatever comes next, the time lost is less
than twice that of the best decision in hindsight.

The forward and the backward pass have plans of their own, and so have the threads that run them: autograd's thread runs
the backward pass, and the forward pass of recomputed layers. All layers of a model share their shapes.
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
    """The times that decide."""

    # Building one plan: `plan_build_s` of the calibration.
    build_s: float
    # cuDNN against the varlen kernel, per FLOP of the call. Measured on one H200 at 64K tokens, head size 128:
    # 1 / 361 - 1 / 624 s per TFLOP forward, 1 / 320 - 1 / 536 backward (benchmarks/RESULTS.md).
    saved_s_per_flop: float = 1.2e-15
    # What a kernel call of its own must save for sequences that are packed with others: it costs launches and a copy of
    # its results. An estimate, not measured.
    split_s: float = 5e-5


class Shape(NamedTuple):
    """What an execution plan is built for."""

    backward: bool
    sequences: int
    queries: int  # of each sequence
    keys: int
    causal: bool
    heads: int  # of the queries
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def flops(self) -> float:
        """FLOPs of a call: two products of a multiply-add per (query, key) pair, five in the backward pass."""
        pairs = self.sequences * self.queries * self.keys / (2 if self.causal else 1)
        return 2 * (5 if self.backward else 2) * pairs * self.heads * self.head_dim


class Plans(threading.local):
    """Decides call by call whether to use cuDNN, separately in each thread."""

    def __init__(self, costs: PlanCosts, most_shapes: int = MOST_SHAPES) -> None:
        self._costs, self._most_shapes = costs, most_shapes
        self._saved: dict[Shape, float] = {}  # seconds that cuDNN saves on the calls so far; most recently used last

    def pay(self, shape: Shape, packed: bool = False) -> bool:
        """Count a call, and return whether it uses cuDNN. Once true for a shape, it stays true until forgotten.

        `packed` says that the sequences of this shape are packed with others, of which they would have to be separated.
        """
        of_call = shape.flops * self._costs.saved_s_per_flop
        if packed and of_call < self._costs.split_s:
            return False
        saved = self._saved.pop(shape, 0.0)
        if saved < self._costs.build_s:
            saved += of_call
        self._saved[shape] = saved
        if len(self._saved) > self._most_shapes:
            del self._saved[next(iter(self._saved))]
        return saved >= self._costs.build_s


class Run(NamedTuple):
    """Consecutive sequences of a call that have the same numbers of queries and of keys."""

    sequences: int
    queries: int  # of each sequence
    keys: int


@lru_cache(maxsize=1024)
def runs(call: Call) -> tuple[Run, ...]:
    """Divide the sequences of a call into runs. Cached, because all layers of a micro-batch make the same calls."""
    sizes = ((rows.stop - rows.start, keys.stop - keys.start) for rows, keys in call.sequences())
    return tuple(Run(len(list(same)), *size) for size, same in groupby(sizes))


def computes(run: Run, causal: bool) -> bool:
    """Return whether cuDNN computes these sequences correctly, as a batch.

    If the call is not causal, cuDNN's backward pass returns NaN on Hopper (seen with 9.19; reported up to 9.26): dq for
    keys = 64 modulo 128 and a log-sum-exp below -88.7 (pytorch#196678, cudnn-frontend#628); dk and dv for one query and
    a negative log-sum-exp (cudnn-frontend#1072). It refuses causal calls of one query and one key. We exclude all calls
    with fewer than 64 queries, half a tile of the kernel.
    """
    return run.queries >= 64 and (causal or run.keys % 128 != 64)
