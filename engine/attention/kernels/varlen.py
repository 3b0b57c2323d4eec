"""Adapts GPU libraries for packed sequences of different lengths ("varlen") to the kernel interface of call.py.

These libraries take cumulative sequence lengths, and their log-sum-exp is [H,T] instead of [T,H].

Letters: T query tokens, H query heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.kernels.call import Call, Functions, Packed, contiguous_heads, packed

Attend = Callable[[Tensor, Tensor, Tensor, Packed, Packed, Call], tuple[Tensor, Tensor]]
Derive = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Packed, Packed, Call], tuple[Tensor, Tensor, Tensor]]


class Library(NamedTuple):
    """The two functions of a library, with a common signature.

    `attend(q, k, v, queries, keys, call)` returns the output and the log-sum-exp [H,T];
    `derive(dout, q, k, v, out, lse [H,T], queries, keys, call)` returns dq, dk, dv. `queries` and `keys` are the bounds
    of the call on the device.
    """

    attend: Attend
    derive: Derive

    def functions(self) -> Functions:
        """Return the functions in the interface of a kernel (call.py)."""
        return Functions(self._forward, self._backward)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        if len(call.q_bounds) == 1:
            return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        q, k, v = map(contiguous_heads, (q, k, v))
        out, lse = self.attend(q, k, v, *_bounds(call, q.device), call)
        return out, lse.transpose(0, 1)

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        if len(call.q_bounds) == 1:
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dout, q, k, v, out = map(contiguous_heads, (dout.to(q.dtype), q, k, v, out.to(q.dtype)))
        by_head = lse.to(torch.float32).transpose(0, 1).contiguous()
        return self.derive(dout, q, k, v, out, by_head, *_bounds(call, q.device), call)


def _bounds(call: Call, device: torch.device) -> tuple[Packed, Packed]:
    return packed(call.q_bounds, device), packed(call.kv_bounds, device)
