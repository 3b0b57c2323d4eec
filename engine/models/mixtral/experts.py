"""A mixture-of-experts feed-forward layer: each token goes through the k experts that a router chooses, none dropped.

Letters: T tokens, C hidden size, E experts, k experts of a token, F width of an expert.

Experts are one stacked parameter per projection. As one module each they would be gathered in an order that depends on
the data under ZeRO-3, and one that no token chose would have no gradient on that rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config.schema import Balance, Model
from engine.dtypes import wider
from engine.models.llama.layers import Routed
from engine.models.mixtral.grouped import grouped
from engine.models.pointwise import SWIGLU, Op
from engine.models.tiles import in_tiles
from engine.models.undrawn import Linear


class Router(Linear):
    """Scores of E experts in at least float32: in bf16 near ones are equal, and the choice is then left to chance.

    A module of its own, so that whoever gathers its weight for `forward` (ZeRO-3) gathers it there.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [T,E] of x [T,C]."""
        wide = wider(x.dtype)
        return F.linear(x.to(wide), self.weight.to(wide))


class Experts(nn.Module):
    """The k of E SwiGLU experts with the largest router probability, weighted by it (Jiang et al. 2024, section 2.1).

    Balanced by bias, an expert's score for the choice is its probability plus a bias; its weight stays the probability
    (Wang et al. 2024, auxiliary-loss-free load balancing). The bias is kept as a whole number of steps of the rate, so
    that no dtype rounds it and it is the same on every rank. With a `tile` so many tokens are computed at a time.
    """

    op: Op = SWIGLU
    bias: Tensor | None

    def __init__(self, shape: Model, balance: Balance | None = None, tile: int = 0) -> None:
        super().__init__()
        self.top_k, self.tile = shape.top_k, tile
        self.router = Router(shape.hidden, shape.experts)
        self.gate = nn.Parameter(torch.zeros(shape.experts, shape.ffn, shape.hidden))
        self.up = nn.Parameter(torch.zeros(shape.experts, shape.ffn, shape.hidden))
        self.down = nn.Parameter(torch.zeros(shape.experts, shape.hidden, shape.ffn))
        by_bias = balance is not None and balance.by == "bias"
        self.rate = balance.bias_rate if balance is not None else 0.0
        self.register_buffer("bias", torch.zeros(shape.experts, dtype=torch.int64) if by_bias else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Routed]:
        """Return the layer's output [T,C], and what the router said and chose."""
        out, *routed = in_tiles(self._experts, x, self.tile, self.parameters()) if self.tile else self._experts(x)
        return out, Routed(*routed)

    def _experts(self, x: Tensor) -> tuple[Tensor, ...]:
        routed, weights = self._route(x)
        slots = routed.chosen.flatten()  # [T k]: the expert of each row, token by token
        order = slots.argsort(stable=True)
        back = order.argsort()
        rows = _Permuted.apply(x.repeat_interleave(self.top_k, dim=0), order, back)
        counts = slot_counts(slots, len(self.gate))
        hidden = self.op(grouped(rows, self.gate, counts), grouped(rows, self.up, counts))
        out = _Permuted.apply(grouped(hidden, self.down, counts), back, order).unflatten(0, (-1, self.top_k))
        return (out * weights[..., None]).sum(1).to(x.dtype), *routed

    def _route(self, x: Tensor) -> tuple[Routed, Tensor]:
        """Return logits and choice, and the weights [T,k] of the chosen experts, which sum to one for each token."""
        logits = self.router(x)
        probabilities = logits.softmax(-1)
        scores = probabilities.detach()
        if self.bias is not None:
            scores = scores + self.rate * self.bias.to(scores.dtype)
        chosen = scores.topk(self.top_k, dim=-1).indices
        weights = probabilities.gather(-1, chosen)
        return Routed(logits, chosen), weights / weights.sum(-1, keepdim=True)


def slot_counts(slots: Tensor, experts: int) -> Tensor:
    """Return how often each number below `experts` is in slots: int64 [experts]. No transfer to the host, unlike
    `bincount`."""
    return slots.new_zeros(experts).scatter_add_(0, slots, torch.ones_like(slots))


class _Permuted(torch.autograd.Function):
    """rows[order], and its gradient by `back`, the inverse: autograd's own adds rows up, slowly and in any order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient[0][back], None, None
