"""A kernel's first call: tiny attention on the device, forward and backward, against the reference in float64.

Three calls: packed causal sequences, such of one length (cuDNN gets no others), and blocks of a ring (unequal numbers
of queries and keys, with an output and a log-sum-exp that belong to more keys than the call's). Query heads share key
heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.kernels import reference
from engine.attention.kernels.call import Call, Functions
from engine.close import too_far
from engine.dtypes import wider

# Largest error of a tensor, max|a - b| / max|b|: some ten times what rounding the inputs' dtype makes.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4, torch.float64: 1e-10}
NAMES = ("output", "log-sum-exp", "dq", "dk", "dv")
CAUSAL = Call((0, 5, 70), (0, 5, 70), causal=True)
EVEN = Call((0, 35, 70), (0, 35, 70), causal=True)
BLOCK = Call((0, 24, 48), (0, 40, 80), causal=False)
ALL_KEYS = Call((0, 24, 48), (0, 60, 120), causal=False)
_Four = tuple[Tensor, Tensor, Tensor, Tensor]
_KEYS = torch.cat((torch.arange(40), torch.arange(60, 100)))  # the first 40 of 60 of both sequences


def fault(kernel: Functions, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return what is wrong with a kernel's numbers, or None."""
    all_ = torch.arange(70)
    for call, of, keys in ((CAUSAL, CAUSAL, all_), (EVEN, EVEN, all_), (BLOCK, ALL_KEYS, _KEYS)):
        q, k, v, dout = _inputs(of, device, dtype, head_dim)
        out, lse = reference.forward(q.double(), k.double(), v.double(), of)
        k, v = k[keys], v[keys]
        found = _five(kernel, call, (q, k, v, dout), out.to(dtype), lse.to(wider(dtype)))
        doubles = (q.double(), k.double(), v.double(), dout.double())
        expected = _five(reference.load(), call, doubles, out, lse)
        if wrong := too_far(zip(NAMES, found, expected, strict=True), TOLERANCE[dtype]):
            return wrong
    return None


def _five(kernel: Functions, call: Call, inputs: _Four, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
    q, k, v, dout = inputs
    return *kernel.forward(q, k, v, call), *kernel.backward(dout, q, k, v, out, lse, call)


def _inputs(call: Call, device: torch.device, dtype: torch.dtype, head_dim: int) -> _Four:
    """Return q, k, v and the output's gradient: 4 query heads, 2 key heads."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((call.q_bounds[-1], 4), (call.kv_bounds[-1], 2), (call.kv_bounds[-1], 2), (call.q_bounds[-1], 4))
    q, k, v, dout = (torch.randn(*shape, head_dim, generator=generator).to(device, dtype) for shape in shapes)
    return q, k, v, dout
