"""cuDNN's attention kernel, called through PyTorch, for sequences of one length whose shape comes again.

PyTorch supports cuDNN's packed sequences only without GQA. So a call is divided into runs of sequences with the same
numbers of queries and of keys, each of which is a dense batch. Runs that cuDNN computes wrongly or not at all, and
those for which building an execution plan is not worth its time (plans.py), use PyTorch's varlen kernel. Both kernels
define the log-sum-exp in the same way, so a ring may use a different one in each round, and a call a different one in
its backward pass.

Letters: N sequences, T query tokens and S key tokens of each, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.kernels import torch_varlen
from engine.attention.kernels.call import Call, Functions
from engine.attention.kernels.plans import PlanCosts, Plans, Run, Shape, computes, runs


def load(build_s: float) -> Functions:
    """Return functions that use cuDNN for shapes that come again, and PyTorch's varlen kernel for others.

    `build_s` is the time in seconds of building an execution plan; with 0, cuDNN is used from a shape's first call on.
    """
    return _Cudnn(Plans(PlanCosts(build_s)), torch_varlen.load()).functions()


class _Part(NamedTuple):
    """Consecutive sequences of a call: a run that cuDNN computes, or runs for the other kernel."""

    by_cudnn: bool
    rows: slice
    keys: slice
    call: Call


@dataclass(frozen=True)
class _Cudnn:
    """Uses cuDNN for runs that it can compute and whose shape pays for a plan, and `others` for all other runs."""

    plans: Plans
    others: Functions

    def functions(self) -> Functions:
        return Functions(self._forward, self._backward)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        parts = self._parts(call, q, k, backward=False)
        kernels = {True: _forward, False: self.others.forward}
        if len(parts) == 1:
            return kernels[parts[0].by_cudnn](q, k, v, call)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        for served, rows, keys, part in parts:
            out[rows], lse[rows] = kernels[served](q[rows], k[keys], v[keys], part)
        return out, lse

    def _backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = self._parts(call, q, k, backward=True)
        kernels = {True: _backward, False: self.others.backward}
        if len(parts) == 1:
            return kernels[parts[0].by_cudnn](dout, q, k, v, out, lse, call)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        for served, rows, keys, part in parts:
            inputs = (dout[rows], q[rows], k[keys], v[keys], out[rows], lse[rows])
            dq[rows], dk[keys], dv[keys] = kernels[served](*inputs, part)
        return dq, dk, dv

    def _parts(self, call: Call, q: Tensor, k: Tensor, backward: bool) -> list[_Part]:
        """Divide a call, which is one part of `others` if cuDNN computes none of its runs."""
        found = runs(call)
        parts: list[tuple[bool, int, int]] = []  # with the first sequence, and the one after the last
        start = 0
        for run in found:
            stop = start + run.sequences
            served = self._serves(run, call.causal, q, k, backward, packed=len(found) > 1)
            if parts and not served and not parts[-1][0]:
                start = parts.pop()[1]
            parts.append((served, start, stop))
            start = stop
        if len(parts) < 2:
            return [_Part(bool(parts) and parts[0][0], slice(0, len(q)), slice(0, len(k)), call)]
        return [_Part(served, *_cut(call, start, stop)) for served, start, stop in parts]

    def _serves(self, run: Run, causal: bool, q: Tensor, k: Tensor, backward: bool, packed: bool) -> bool:
        shape = Shape(backward, *run, causal, q.shape[1], k.shape[1], q.shape[2], q.dtype)
        return computes(run, causal) and self.plans.pay(shape, packed)


def _cut(call: Call, start: int, stop: int) -> tuple[slice, slice, Call]:
    """Return the rows, the keys and the call of the sequences start .. stop - 1."""
    q_bounds, kv_bounds = (bounds[start : stop + 1] for bounds in (call.q_bounds, call.kv_bounds))
    part = call._replace(
        q_bounds=tuple(bound - q_bounds[0] for bound in q_bounds),
        kv_bounds=tuple(bound - kv_bounds[0] for bound in kv_bounds),
    )
    return slice(q_bounds[0], q_bounds[-1]), slice(kv_bounds[0], kv_bounds[-1]), part


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    count = len(call.q_bounds) - 1
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(_batched(x, count) for x in (q, k, v)), None, True, 0.0, call.causal, False
    )
    return _packed(out), _packed(lse.reshape(out.shape[:3]))


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
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
