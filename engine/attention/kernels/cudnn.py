"""cuDNN's attention kernel, called through PyTorch, for sequences of one length whose shape comes again.

A call is divided: runs of sequences with the same numbers of queries and of keys use cuDNN if their shape pays for an
execution plan (plans.py). The rest uses PyTorch's varlen kernel, as does what cuDNN computes wrongly or not at all.
Both kernels define the log-sum-exp in the same way, so a ring may use a different one in each round, and a call a
different one in its backward pass.

Letters: N sequences, T query tokens and S key tokens of each, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.kernels import torch_varlen
from engine.attention.kernels.call import Call, Functions
from engine.attention.kernels.plans import Heads, PlanCosts, Plans, cudnn_runs


def load(build_s: float) -> Functions:
    """Return functions that use cuDNN for shapes that come again, and PyTorch's varlen kernel for others.

    `build_s` is the time in seconds of building an execution plan. With 0, all that cuDNN computes correctly uses it
    from the first call on, also sequences that share a call with others.
    """
    costs = PlanCosts(build_s) if build_s else PlanCosts(build_s, split_s=0.0)
    return _Cudnn(Plans(costs), torch_varlen.load()).functions()


class _Part(NamedTuple):
    """Consecutive sequences of a call, for one of the two kernels."""

    by_cudnn: bool
    rows: slice
    keys: slice
    call: Call


@dataclass(frozen=True)
class _Cudnn:
    """Uses cuDNN for the runs of a call whose shape pays for a plan, and `others` for the rest."""

    plans: Plans
    others: Functions

    def functions(self) -> Functions:
        return Functions(self._forward, self._backward)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        parts = self._parts(call, q, k, backward=False)
        if len(parts) == 1:
            return (_dense_forward if parts[0].by_cudnn else self.others.forward)(q, k, v, call)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        for by_cudnn, rows, keys, part in parts:
            compute = _dense_forward if by_cudnn else self.others.forward
            out[rows], lse[rows] = compute(q[rows], k[keys], v[keys], part)
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = self._parts(call, q, k, backward=True)
        if len(parts) == 1:
            return (_dense_backward if parts[0].by_cudnn else self.others.backward)(dout, q, k, v, out, lse, call)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for by_cudnn, rows, keys, part in parts:
            compute = _dense_backward if by_cudnn else self.others.backward
            inputs = (dout[rows], q[rows], k[keys], v[keys], out[rows], lse[rows])
            dq[rows], dk[keys], dv[keys] = compute(*inputs, part)
        return dq, dk, dv

    def _parts(self, call: Call, q: Tensor, k: Tensor, backward: bool) -> tuple[_Part, ...]:
        """Divide a call between the two kernels. An empty call has no parts."""
        heads = Heads(q.shape[1], k.shape[1], q.shape[2], q.dtype)
        found = cudnn_runs(call, backward, heads, self.plans.costs)
        return _divided(call, tuple((one.start, one.stop) for one in found if self.plans.use_cudnn(one)))


@lru_cache(maxsize=1024)
def _divided(call: Call, by_cudnn: tuple[tuple[int, int], ...]) -> tuple[_Part, ...]:
    """Divide a call into the sequences start .. stop - 1 of each pair in `by_cudnn`, and the sequences between them.

    Cached, because all layers of a micro-batch make the same calls.
    """
    parts, done, count = [], 0, len(call.q_bounds) - 1
    for start, stop in (*by_cudnn, (count, count)):
        if done < start:
            parts.append(_part(call, done, start, by_cudnn=False))
        if start < stop:
            parts.append(_part(call, start, stop, by_cudnn=True))
        done = stop
    return tuple(parts)


def _part(call: Call, start: int, stop: int, by_cudnn: bool) -> _Part:
    q_bounds, kv_bounds = (bounds[start : stop + 1] for bounds in (call.q_bounds, call.kv_bounds))
    of_part = call._replace(
        q_bounds=tuple(bound - q_bounds[0] for bound in q_bounds),
        kv_bounds=tuple(bound - kv_bounds[0] for bound in kv_bounds),
    )
    return _Part(by_cudnn, slice(q_bounds[0], q_bounds[-1]), slice(kv_bounds[0], kv_bounds[-1]), of_part)


def _dense_forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Compute sequences of one length as a batch."""
    count = len(call.q_bounds) - 1
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(_batched(x, count) for x in (q, k, v)), None, True, 0.0, call.causal, False
    )
    return _packed(out), _packed(lse.reshape(out.shape[:3]))


def _dense_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of sequences of one length as a batch."""
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


def _batched(x: Tensor, count: int) -> Tensor:
    """View packed [N*T,H,D] as [N,H,T,D]; `count` is N. Copies x if it is not contiguous: cuDNN requires equal strides
    for all of its tensors."""
    batched: Tensor = x.contiguous().unflatten(0, (count, -1))
    return batched.transpose(1, 2)


def _packed(x: Tensor) -> Tensor:
    """View [N,H,T,...] as packed [N*T,H,...]; copies if the strides do not allow a view."""
    return x.transpose(1, 2).flatten(0, 1)
