"""The one seam for attention kernels: packed sequences in, output and log-sum-exp out; and the gradients.

Letters: T query tokens, S key tokens, H query heads, G key and value heads (G divides H), D head size.
Sequence i of a call has queries q_bounds[i] .. q_bounds[i + 1] and keys kv_bounds[i] .. kv_bounds[i + 1], never empty.

Kernels return the wider of the input's dtype and float32. A ring merges block outputs; were they rounded to bf16 first,
the error would grow with the ring's degree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)


class Call(NamedTuple):
    """The bounds of a packed call, and whether query i of a sequence sees only keys up to i."""

    q_bounds: Sequence[int]
    kv_bounds: Sequence[int]
    causal: bool

    def sequences(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows of each sequence's queries and keys."""
        for i in range(len(self.q_bounds) - 1):
            yield slice(self.q_bounds[i], self.q_bounds[i + 1]), slice(self.kv_bounds[i], self.kv_bounds[i + 1])


Forward = Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Kernel:
    """A kernel and why it was chosen.

    `forward(q [T,H,D], k [S,G,D], v [S,G,D], call)` returns the output [T,H,D] and the log-sum-exp [T,H];
    `backward(dout, q, k, v, out, lse, call)` returns dq, dk, dv. `out` and `lse` may be those of a larger attention
    that the call's keys are a part of: then the gradients are this part's share of it.
    """

    name: str
    reason: str
    forward: Forward
    backward: Backward


def wider(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are kept: at least float32, and float64 stays float64."""
    return torch.promote_types(dtype, torch.float32)


@cache
def choose(device: torch.device, dtype: torch.dtype, head_dim: int, prefer: str | None = None) -> Kernel:
    """Return the kernel for a device, dtype and head size, and log the reason once. `prefer` forces one by name."""
    if prefer == "reference":
        kernel = Kernel("reference", "asked for", _reference_forward, _reference_backward)
    elif device.type == "cpu" and prefer in (None, "fused_cpu"):
        kernel = Kernel("fused_cpu", "PyTorch's fused kernel for CPU", _fused_forward, _fused_backward)
    elif prefer is None:
        reason = f"there is no fused kernel for {device.type} yet"
        kernel = Kernel("reference", reason, _reference_forward, _reference_backward)
    else:
        raise ValueError(f"no kernel {prefer!r} for {device.type}")
    _LOG.info("attention kernel for %s, head size %d: %s (%s)", dtype, head_dim, kernel.name, kernel.reason)
    return kernel


def _fused_forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    q, k, v = map(_wide, (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    for rows, keys in call.sequences():
        part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _batched(q[rows]), _batched(k[keys]), _batched(v[keys]), 0.0, call.causal
        )
        out[rows], lse[rows] = (x[0].transpose(0, 1) for x in part)
    return out, lse


def _fused_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = map(_wide, (dout, q, k, v, out))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for rows, keys in call.sequences():
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_batched(x) for x in (dout[rows], q[rows], k[keys], v[keys], out[rows])),
            lse[rows].transpose(0, 1)[None],
            0.0,
            call.causal,
        )
        dq[rows], dk[keys], dv[keys] = (g[0].transpose(0, 1) for g in gradients)
    return dq, dk, dv


def _wide(x: Tensor) -> Tensor:
    """Return x as kernels take it; given heads that are strided, PyTorch's kernel (2.13) returns wrong results."""
    return x.to(wider(x.dtype)).contiguous()


def _batched(x: Tensor) -> Tensor:
    """Return [T,H,D] as the [1,H,T,D] that PyTorch's kernel takes, without a copy."""
    return x.transpose(0, 1)[None]


def _reference_forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    q, k, v = map(_wide, (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    for rows, keys in call.sequences():
        scores = _scores(q[rows], k[keys], call.causal)  # [H,T,S]
        lse[rows] = scores.logsumexp(-1).transpose(0, 1)
        weights = (scores - lse[rows].transpose(0, 1)[..., None]).exp()
        out[rows] = torch.einsum("hts,shd->thd", weights, _repeat(v[keys], q.shape[1]))
    return out, lse


def _reference_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    dout, q, k, v, out = map(_wide, (dout, q, k, v, out))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    heads, scale = q.shape[1], q.shape[2] ** -0.5
    for rows, keys in call.sequences():
        weights = (_scores(q[rows], k[keys], call.causal) - lse[rows].transpose(0, 1)[..., None]).exp()
        delta = (dout[rows] * out[rows]).sum(-1).transpose(0, 1)[..., None]
        dweights = torch.einsum("thd,shd->hts", dout[rows], _repeat(v[keys], heads))
        dscores = weights * (dweights - delta) * scale
        dq[rows] = torch.einsum("hts,shd->thd", dscores, _repeat(k[keys], heads))
        dk[keys] = _sum_groups(torch.einsum("hts,thd->shd", dscores, q[rows]), k.shape[1])
        dv[keys] = _sum_groups(torch.einsum("hts,thd->shd", weights, dout[rows]), v.shape[1])
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores: Tensor = torch.einsum("thd,shd->hts", q, _repeat(k, q.shape[1])) * q.shape[2] ** -0.5
    if causal:
        future = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores


def _repeat(x: Tensor, heads: int) -> Tensor:
    repeated: Tensor = x.repeat_interleave(heads // x.shape[1], dim=1)
    return repeated


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    summed: Tensor = x.unflatten(1, (groups, -1)).sum(2)
    return summed
