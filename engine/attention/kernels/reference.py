"""Attention in plain PyTorch, for any dtype and device, one sequence at a time: the reference of the self-tests.

Letters: T query tokens, S key tokens, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.kernels.call import Call, Functions, wide


def load() -> Functions:
    """Return the functions of the reference implementation."""
    return Functions(forward, backward)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Compute attention of q [T,H,D], k and v [S,G,D]. Returns the output [T,H,D] and the log-sum-exp [T,H]."""
    q, k, v = map(wide, (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2])
    for rows, keys in call.sequences():
        scores = _scores(q[rows], k[keys], call.causal)  # [H,T,S]
        lse[rows] = scores.logsumexp(-1).transpose(0, 1)
        weights = (scores - lse[rows].transpose(0, 1)[..., None]).exp()
        out[rows] = torch.einsum("hts,shd->thd", weights, _repeat(v[keys], q.shape[1]))
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq [T,H,D], dk and dv [S,G,D] from dout [T,H,D] and the output and log-sum-exp of `forward`."""
    dout, q, k, v, out = map(wide, (dout, q, k, v, out))
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
    """Compute the scaled scores [H,T,S] of one sequence. If `causal`, those of future keys are -inf."""
    scores: Tensor = torch.einsum("thd,shd->hts", q, _repeat(k, q.shape[1])) * q.shape[2] ** -0.5
    if causal:
        future = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores


def _repeat(x: Tensor, heads: int) -> Tensor:
    """Repeat each key or value head for its group of query heads: [S,G,D] to [S,H,D]."""
    repeated: Tensor = x.repeat_interleave(heads // x.shape[1], dim=1)
    return repeated


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """Sum over the query heads of each group: [S,H,D] to [S,G,D], the gradient of `_repeat`."""
    summed: Tensor = x.unflatten(1, (groups, -1)).sum(2)
    return summed
