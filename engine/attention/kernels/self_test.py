"""The self-test of attention kernels: compares small forward and backward calls with the reference in float64.

It makes three calls: packed causal sequences; packed causal sequences of equal length (the only ones that cuDNN
computes); and ring blocks, which have different numbers of queries and keys, and whose `out` and `lse` in the backward
pass cover more keys than the call. All calls have fewer key heads than query heads (GQA).
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.kernels import reference
from engine.attention.kernels.call import Call, Functions
from engine.close import mismatch
from engine.dtypes import wider

# Largest allowed error max|a - b| / max|b|: about ten times the rounding error of the inputs' dtype.
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-4, torch.float64: 1e-10}
NAMES = ("output", "log-sum-exp", "dq", "dk", "dv")
CAUSAL = Call((0, 5, 70), (0, 5, 70), causal=True)
EVEN = Call((0, 35, 70), (0, 35, 70), causal=True)
BLOCK = Call((0, 24, 48), (0, 40, 80), causal=False)
ALL_KEYS = Call((0, 24, 48), (0, 60, 120), causal=False)
_BLOCK_KEYS = torch.cat((torch.arange(40), torch.arange(60, 100)))  # the first 40 of the 60 keys of each sequence


def fault(kernel: Functions, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Compare a kernel's outputs and gradients with the reference.

    Returns a description of the first wrong result, or None if all are correct.
    """
    generator = torch.Generator().manual_seed(0)

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, head_dim, generator=generator).to(device, dtype)

    all_keys = torch.arange(70)
    for call, full, kept in ((CAUSAL, CAUSAL, all_keys), (EVEN, EVEN, all_keys), (BLOCK, ALL_KEYS, _BLOCK_KEYS)):
        queries, keys = full.q_bounds[-1], full.kv_bounds[-1]
        q, k, v, dout = random(queries, 4), random(keys, 2), random(keys, 2), random(queries, 4)
        out, lse = reference.forward(q.double(), k.double(), v.double(), full)
        k, v = k[kept], v[kept]
        narrow_out, narrow_lse = out.to(dtype), lse.to(wider(dtype))
        found = *kernel.forward(q, k, v, call), *kernel.backward(dout, q, k, v, narrow_out, narrow_lse, call)
        q, k, v, dout = (x.double() for x in (q, k, v, dout))
        expected = *reference.forward(q, k, v, call), *reference.backward(dout, q, k, v, out, lse, call)
        if wrong := mismatch(zip(NAMES, found, expected, strict=True), TOLERANCE[dtype]):
            return wrong
    return None
