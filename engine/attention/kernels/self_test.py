"""The self-test of attention kernels: compares small forward and backward calls with the reference in float64.

All calls have fewer key heads than query heads (GQA):

- packed causal sequences, and such of equal length, which cuDNN computes;
- packed sequences of one to several tiles of a kernel (64 to 192 rows), causal and not, which several blocks of threads
  of the GPU share;
- ring blocks, which have different numbers of queries and keys, and whose `out` and `lse` in the backward pass cover
  more keys than the call; also blocks of two shapes, for which cuDNN needs two calls;
- blocks of one query, for which flash-attn 2 swaps queries and heads; their log-sum-exps are far apart;
- blocks with a log-sum-exp of about -120, which trained weights reach: exp(-lse) overflows in float32. cuDNN's backward
  pass then returns NaN for 64 keys (modulo 128), and for one query (plans.py).
"""

from __future__ import annotations

from typing import NamedTuple

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
EVEN = Call((0, 70, 140), (0, 70, 140), causal=True)
PACK = Call((0, 1, 201, 340), (0, 1, 201, 340), causal=True)
BLOCK = Call((0, 72, 144), (0, 40, 80), causal=False, overlapped=True)
BLOCKS = Call((0, 72, 136), (0, 40, 140), causal=False, overlapped=True)
LONG_BLOCKS = Call((0, 150, 280), (0, 90, 280), causal=False, overlapped=True)
ONE_QUERY = Call((0, 1, 2, 3), (0, 40, 47, 197), causal=False)
TILE = Call((0, 72, 144), (0, 64, 128), causal=False)
ONE_QUERY_LOW = Call((0, 1, 2), (0, 128, 256), causal=False)
LOW = -120.0  # log-sum-exp


class Case(NamedTuple):
    """A call, and the additional keys of each sequence that `out` and `lse` cover in the backward pass."""

    call: Call
    more_keys: int = 0
    low: bool = False  # a log-sum-exp of about LOW


CASES = (
    Case(CAUSAL),
    Case(EVEN),
    Case(PACK),
    Case(BLOCK, more_keys=20),
    Case(BLOCKS, more_keys=20),
    Case(LONG_BLOCKS, more_keys=20),
    Case(ONE_QUERY, more_keys=20),
    Case(TILE, low=True),
    Case(ONE_QUERY_LOW, low=True),
)


def fault(kernel: Functions, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Compare a kernel's outputs and gradients with the reference.

    Returns a description of the first wrong result, or None if all are correct.
    """
    generator = torch.Generator().manual_seed(0)

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, head_dim, generator=generator).to(device, dtype)

    for call, more_keys, low in CASES:
        full = call._replace(kv_bounds=tuple(stop + i * more_keys for i, stop in enumerate(call.kv_bounds)))
        queries, keys = full.q_bounds[-1], full.kv_bounds[-1]
        q, k, v, dout = random(queries, 4), random(keys, 2), random(keys, 2), random(queries, 4)
        if low:
            # All scores are about LOW. The keys' part of it is small, because its rounding is an error of dq.
            q[..., 0], k[..., 0] = LOW / -4 * head_dim**0.5, -4
        kept = torch.cat([torch.arange(rows.start, rows.stop - more_keys) for _, rows in full.sequences()])
        out, lse = reference.forward(q.double(), k.double(), v.double(), full)
        k, v = k[kept], v[kept]
        narrow_out, narrow_lse = out.to(dtype), lse.to(wider(dtype))
        found = *kernel.forward(q, k, v, call), *kernel.backward(dout, q, k, v, narrow_out, narrow_lse, call)
        q, k, v, dout = (x.double() for x in (q, k, v, dout))
        expected = *reference.forward(q, k, v, call), *reference.backward(dout, q, k, v, out, lse, call)
        if wrong := mismatch(zip(NAMES, found, expected, strict=True), TOLERANCE[dtype]):
            return f"{wrong} for {call}{f' with a log-sum-exp of {LOW}' if low else ''}"
    return None
