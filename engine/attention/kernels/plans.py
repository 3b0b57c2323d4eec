"""When cuDNN's faster kernel is worth the execution plan that it needs for a new shape.

cuDNN builds a plan for every new shape, which takes about half a second, and PyTorch keeps one cache of plans per
thread. Most of HDP's shapes come once. So a shape uses the varlen kernel until the time that cuDNN would have saved on
all its calls reaches the time of building the plan (the ski-rental rule): whatever comes next, the time lost is less
than twice that of the best decision in hindsight.

The forward and the backward pass have plans of their own, and so have the threads that run them: autograd's thread runs
the backward pass, and the forward pass of recomputed layers. All layers of a model share their shapes.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import NamedTuple

import torch

from engine.attention.kernels.call import Call

MOST_SHAPES = 4096  # shapes that a thread remembers; the one that was used least recently is forgotten first


class PlanCosts(NamedTuple):
    """The times that decide."""

    # Building one plan: `plan_build_s` of the calibration.
    build_s: float
    # cuDNN against the varlen kernel, per FLOP of the call: 1 / 350 TFLOP/s - 1 / 650 TFLOP/s. An estimate for one
    # H200, not measured yet.
    saved_s_per_flop: float = 1.3e-15


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

    def pay(self, shape: Shape) -> bool:
        """Count a call, and return whether it uses cuDNN. Once true for a shape, it stays true until forgotten."""
        saved = self._saved.pop(shape, 0.0)
        if saved < self._costs.build_s:
            saved += shape.flops * self._costs.saved_s_per_flop
        self._saved[shape] = saved
        if len(self._saved) > self._most_shapes:
            del self._saved[next(iter(self._saved))]
        return saved >= self._costs.build_s


def batch(call: Call) -> tuple[int, int, int] | None:
    """Return the sequences of a call and the queries and keys of each, if cuDNN can compute it correctly, else None.

    All sequences must have the same number of queries and the same number of keys, because PyTorch supports cuDNN's
    packed sequences only without GQA.
    If the call is not causal, cuDNN's backward pass returns NaN on Hopper (9.26 and before): dq for keys = 64 modulo
    128 and a log-sum-exp below -88.7 (pytorch#196678, cudnn-frontend#628); dk and dv for one query and a negative
    log-sum-exp (cudnn-frontend#1072). We exclude calls with fewer than 64 queries, half a tile of the kernel.
    """
    queries, keys = ({stop - start for start, stop in pairwise(bounds)} for bounds in (call.q_bounds, call.kv_bounds))
    if len(queries) != 1 or len(keys) != 1:
        return None
    of_each, keys_of_each = queries.pop(), keys.pop()
    if not call.causal and (keys_of_each % 128 == 64 or of_each < 64):
        return None
    return len(call.q_bounds) - 1, of_each, keys_of_each
