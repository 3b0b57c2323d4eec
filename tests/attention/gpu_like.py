"""A CPU kernel that rounds to bf16 where flash kernels for GPUs do: weights before each product, and all results.

Letters: T query tokens, S key tokens, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.kernels.call import Call, Kernel


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for rows, keys in call.sequences():
        scores = _scores(q[rows], k[keys], call.causal)
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        total = weights.sum(-1, keepdim=True)
        out[rows] = (_rounded(weights) @ _by_head(v[keys], q.shape[1]) / total).transpose(0, 1).bfloat16()
        lse[rows] = (largest + total.log())[..., 0].T
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    heads, groups, scale = q.shape[1], k.shape[1], q.shape[2] ** -0.5
    for rows, keys in call.sequences():
        gradient = _by_head(dout[rows], heads)
        weights = (_scores(q[rows], k[keys], call.causal) - lse[rows].T[..., None]).exp()
        delta = (gradient * _by_head(out[rows], heads)).sum(-1, keepdim=True)
        dscores = _rounded(weights * (gradient @ _by_head(v[keys], heads).mT - delta))
        dq[rows] = (dscores @ _by_head(k[keys], heads) * scale).transpose(0, 1).bfloat16()
        dk[keys] = _summed(dscores.mT @ _by_head(q[rows], heads) * scale, groups)
        dv[keys] = _summed(_rounded(weights).mT @ gradient, groups)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    scores: Tensor = _by_head(q, q.shape[1]) @ _by_head(k, q.shape[1]).mT * q.shape[2] ** -0.5
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf")) if causal else scores


def _by_head(x: Tensor, heads: int) -> Tensor:
    """Return [T,G,D] as [H,T,D] in float32."""
    return x.float().repeat_interleave(heads // x.shape[1], dim=1).transpose(0, 1)


def _summed(x: Tensor, groups: int) -> Tensor:
    """Return [H,S,D] as [S,G,D] in bf16."""
    by_group: Tensor = x.view(groups, -1, *x.shape[1:])
    return by_group.sum(1).transpose(0, 1).bfloat16()


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().float()


GPU_LIKE = Kernel("gpu_like", "for tests", _forward, _backward)
