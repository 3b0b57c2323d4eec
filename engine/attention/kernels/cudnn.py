"""cuDNN's attention kernel, called through PyTorch, for sequences of one length whose shape comes again.

All other calls use PyTorch's varlen kernel: those that cuDNN computes wrongly or not at all, and those for which
building an execution plan is not worth its time (plans.py). Both kernels define the log-sum-exp in the same way, so a
ring may use a different one in each round, and a call a different one in its backward pass.

Letters: N sequences, T query tokens and S key tokens of each, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.kernels import torch_varlen
from engine.attention.kernels.call import Call, Functions
from engine.attention.kernels.plans import PlanCosts, Plans, Shape, batch


def load(build_s: float) -> Functions:
    """Return functions that use cuDNN for shapes that come again, and PyTorch's varlen kernel for others.

    `build_s` is the time in seconds of building an execution plan; with 0, cuDNN is used from a shape's first call on.
    """
    return _Cudnn(Plans(PlanCosts(build_s)), torch_varlen.load()).functions()


@dataclass(frozen=True)
class _Cudnn:
    """Uses cuDNN for calls that it can compute and whose shape pays for a plan; all other calls use `others`."""

    plans: Plans
    others: Functions

    def functions(self) -> Functions:
        return Functions(self._forward, self._backward)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        if not self._serves(call, q, k, backward=False):
            return self.others.forward(q, k, v, call)
        count = len(call.q_bounds) - 1
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *(_batched(x, count) for x in (q, k, v)), None, True, 0.0, call.causal, False
        )
        # Stored by heads, as that of the varlen kernel, so that the compiled merge (merge.py) sees one layout.
        return _packed(out), lse.reshape(out.shape[:3]).transpose(0, 1).flatten(1).T

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self._serves(call, q, k, backward=True):
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

    def _serves(self, call: Call, q: Tensor, k: Tensor, backward: bool) -> bool:
        equal = batch(call)
        return equal is not None and self.plans.pay(
            Shape(backward, *equal, call.causal, q.shape[1], k.shape[1], q.shape[2], q.dtype)
        )


def _batched(x: Tensor, count: int) -> Tensor:
    """View packed [N*T,H,D] as [N,H,T,D]; `count` is N. Copies x if it is not contiguous: cuDNN requires equal strides
    for all of its tensors."""
    batched: Tensor = x.contiguous().unflatten(0, (count, -1))
    return batched.transpose(1, 2)


def _packed(x: Tensor) -> Tensor:
    """View [N,H,T,D] as packed [N*T,H,D]; copies if the strides do not allow a view."""
    return x.transpose(1, 2).flatten(0, 1)
