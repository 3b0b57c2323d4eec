"""cuDNN's kernel, as PyTorch calls it, for calls of sequences of one length; other calls go to PyTorch's varlen kernel.

PyTorch prepares a plan for each new shape (that of a dense batch: it offers cuDNN's ragged form with no GQA), and keeps
it; so does the first call of every new length, which takes longer than a short call itself. Therefore the shortest
sequences go to the varlen kernel too. Both kernels have one log-sum-exp, so each may follow the other in a ring.

Letters: N sequences, T query tokens and S key tokens of each, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.attention.kernels import torch_varlen
from engine.attention.kernels.call import Call, Functions

LEAST_TOKENS = 4096  # of a sequence, before cuDNN gets it


def load() -> Functions:
    """Return the kernel's functions."""
    return _Cudnn(LEAST_TOKENS, torch_varlen.load()).functions()


def load_for_any_length() -> Functions:
    """Return the kernel's functions without a shortest sequence, for tests of a few tokens."""
    return _Cudnn(1, torch_varlen.load()).functions()


@dataclass(frozen=True)
class _Cudnn:
    least_tokens: int
    others: Functions

    def functions(self) -> Functions:
        return Functions(self._forward, self._backward)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        if not self._serves(call):
            return self.others.forward(q, k, v, call)
        count = len(call.q_bounds) - 1
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(_batched(x, count) for x in (q, k, v)), None, True, 0.0, call.causal, False
        )
        return _packed(out), _packed(lse.reshape(*out.shape[:3], 1))[..., 0]

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self._serves(call):
            return self.others.backward(dout, q, k, v, out, lse, call)
        count = len(call.q_bounds) - 1
        queries, keys = len(q) // count, len(k) // count
        seed = q.new_zeros((), dtype=torch.int64)  # of dropout, and its offset
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(_batched(x, count) for x in (dout.to(q.dtype), q, k, v, out.to(q.dtype))),
            _batched(lse.to(torch.float32)[..., None], count).contiguous(),
            seed,
            seed,
            None,
            None,
            None,
            queries,
            keys,
            0.0,
            call.causal,
        )
        dq, dk, dv = map(_packed, gradients)
        return dq, dk, dv

    def _serves(self, call: Call) -> bool:
        queries, keys = _lengths(call.q_bounds), _lengths(call.kv_bounds)
        return len(queries) == len(keys) == 1 and max(*queries, *keys) >= self.least_tokens


def _lengths(bounds: Sequence[int]) -> set[int]:
    return {stop - start for start, stop in pairwise(bounds)}


def _batched(x: Tensor, count: int) -> Tensor:
    """Return packed [N*T,H,D] as [N,H,T,D] over the same memory, which cuDNN wants alike for all of its tensors."""
    batched: Tensor = x.contiguous().unflatten(0, (count, -1))
    return batched.transpose(1, 2)


def _packed(x: Tensor) -> Tensor:
    """Return [N,H,T,D] as [N*T,H,D]."""
    return x.transpose(1, 2).flatten(0, 1)
