"""cuDNN's attention kernel, called through PyTorch, for long sequences that all have the same length.

All other calls use PyTorch's varlen kernel, because PyTorch supports cuDNN's kernel for packed sequences of different
lengths only without GQA. For each new shape cuDNN builds and caches an execution plan, which takes longer than a short
call itself, so short sequences use the varlen kernel too. Both kernels define the log-sum-exp in the same way, so a
ring may use a different one in each round.

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

LEAST_TOKENS = 4096  # sequences with fewer queries and fewer keys use the varlen kernel


def load() -> Functions:
    """Return functions that use cuDNN for long sequences of equal length, and PyTorch's varlen kernel for others."""
    return _Cudnn(LEAST_TOKENS, torch_varlen.load()).functions()


def load_for_any_length() -> Functions:
    """Like `load`, but use cuDNN also for short sequences of equal length, so that tests need only a few tokens."""
    return _Cudnn(1, torch_varlen.load()).functions()


@dataclass(frozen=True)
class _Cudnn:
    """Uses cuDNN for calls whose sequences all have the same number of queries and the same number of keys, one of them
    at least `least_tokens`; all other calls use `others`."""

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
        seed = q.new_zeros((), dtype=torch.int64)  # seed and offset of dropout, which is not used
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
    """Return the distinct lengths of the sequences."""
    return {stop - start for start, stop in pairwise(bounds)}


def _batched(x: Tensor, count: int) -> Tensor:
    """View packed [N*T,H,D] as [N,H,T,D]; `count` is N. Copies x if it is not contiguous: cuDNN requires equal strides
    for all of its tensors."""
    batched: Tensor = x.contiguous().unflatten(0, (count, -1))
    return batched.transpose(1, 2)


def _packed(x: Tensor) -> Tensor:
    """View [N,H,T,D] as packed [N*T,H,D]; copies if the strides do not allow a view."""
    return x.transpose(1, 2).flatten(0, 1)
