"""A mixture-of-experts feed-forward layer: a router chooses k experts for each token, and no token is dropped.

Letters: T tokens, C hidden size, E experts, k experts per token, F width of an expert.

The weights of all experts are stacked into one parameter per projection. If each expert were a module, ZeRO-3 would
gather experts in an order that depends on the data, and an expert that no token chose would have no gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config.schema import Balance, Model
from engine.dtypes import wider
from engine.models.common.pointwise import SWIGLU, Op
from engine.models.common.skip_init import Linear
from engine.models.common.tiles import in_tiles
from engine.models.mixtral.grouped import grouped


class Routed(NamedTuple):
    """The decisions of a router for T tokens."""

    logits: Tensor  # [T,E] in at least float32
    chosen: Tensor  # int64 [T,k], the experts of each token


class Router(Linear):
    """Scores the experts in at least float32: in bf16 similar scores would be equal, and the choice arbitrary.

    It is a module, so that ZeRO-3 gathers its weight for `forward`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits [T,E] of x [T,C]."""
        wide = wider(x.dtype)
        return F.linear(x.to(wide), self.weight.to(wide))


class Experts(nn.Module):
    """Sends each token through the k of E SwiGLU experts with the largest router probability, and adds their outputs,
    weighted by these probabilities divided by their sum (Jiang et al. 2024, section 2.1).

    With `balance.by=bias`, experts are chosen by probability plus bias, but weighted by probability only (Wang et al.
    2024, auxiliary-loss-free load balancing). The bias is stored as an integer, in units of `bias_rate`, so that it is
    exact in every dtype and equal on all ranks.
    """

    op: Op = SWIGLU
    bias: Tensor | None
    tile: int = 0  # tokens per tile (tiles.py), to save memory; 0 computes all tokens at once

    def __init__(self, shape: Model, balance: Balance | None = None) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.router = Router(shape.hidden, shape.experts)
        self.gate = nn.Parameter(torch.zeros(shape.experts, shape.ffn, shape.hidden))
        self.up = nn.Parameter(torch.zeros(shape.experts, shape.ffn, shape.hidden))
        self.down = nn.Parameter(torch.zeros(shape.experts, shape.hidden, shape.ffn))
        by_bias = balance is not None and balance.by == "bias"
        self.rate = balance.bias_rate if balance is not None else 0.0
        self.register_buffer("bias", torch.zeros(shape.experts, dtype=torch.int64) if by_bias else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Routed]:
        """Compute the layer's output [T,C] of x [T,C], and return it with the router's decisions."""
        out, *routed = in_tiles(self._experts, x, self.tile, self.parameters()) if self.tile else self._experts(x)
        return out, Routed(*routed)

    def _experts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute the output [T,C], the router's logits [T,E] and the chosen experts [T,k], all tokens at once."""
        logits = self.router(x)
        probabilities = logits.softmax(-1)
        scores = probabilities.detach()
        if self.bias is not None:
            scores = scores + self.rate * self.bias.to(scores.dtype)
        chosen = scores.topk(self.top_k, dim=-1).indices
        weights = probabilities.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)

        # One row per (token, expert) pair, T * k in all, sorted by expert for the grouped products, then sorted back.
        expert_of_row = chosen.flatten()
        order = expert_of_row.argsort(stable=True)
        inverse = order.argsort()
        rows = _Permute.apply(x.repeat_interleave(self.top_k, dim=0), order, inverse)
        counts = count_each(expert_of_row, len(self.gate))
        hidden = self.op(grouped(rows, self.gate, counts), grouped(rows, self.up, counts))
        out = _Permute.apply(grouped(hidden, self.down, counts), inverse, order).unflatten(0, (-1, self.top_k))
        return (out * weights[..., None]).sum(1).to(x.dtype), logits, chosen


def count_each(numbers: Tensor, limit: int) -> Tensor:
    """Count how often each of 0 .. limit - 1 occurs in int64 `numbers`: int64 [limit].

    Unlike `torch.bincount`, it does not make the host wait for the GPU.
    """
    return numbers.new_zeros(limit).scatter_add_(0, numbers, torch.ones_like(numbers))


class _Permute(torch.autograd.Function):
    """Computes rows[order] for a permutation `order`, with gradient[inverse] as its gradient.

    Autograd's own gradient of indexing is slower and not deterministic, because it adds rows in case an index repeats.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradient[0][inverse], None, None
