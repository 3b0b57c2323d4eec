"""The parts of a LLaMA layer; single-device code on packed tokens.

Letters: T tokens, C hidden size, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.config.schema import Model
from engine.models.pointwise import NORM, ROTATE, SWIGLU, Op
from engine.models.rope import Rotation
from engine.models.tiles import in_tiles
from engine.models.undrawn import Linear

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [T,H,D], k [T,G,D], v [T,G,D] -> [T,H,D]


class Routed(NamedTuple):
    """What the router of a layer of E experts said of T tokens, and the k that it chose for each."""

    logits: Tensor  # [T,E] in at least float32
    chosen: Tensor  # [T,k] int64


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in at least float32 (Zhang and Sennrich 2019)."""

    op: Op = NORM

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x [T,C] in its dtype."""
        return self.op(x, self.weight, self.eps)


def norms_of(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that are rows, not matrices: told by their module, as a rank's share of either is a row."""
    return {module.weight for module in model.modules() if isinstance(module, RMSNorm)}


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding; how tokens meet is the caller's `attend`."""

    op: Op = ROTATE

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q = Linear(shape.hidden, shape.heads * shape.head_dim)
        self.k = Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.v = Linear(shape.hidden, shape.kv_heads * shape.head_dim)
        self.out = Linear(shape.heads * shape.head_dim, shape.hidden)

    def before(self, x: Tensor, by: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T,H,D], k and v [T,G,D] of x [T,C]."""
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        return self.op(q, *by), self.op(k, *by), v

    def after(self, attended: Tensor) -> Tensor:
        """Return the output [T,C] of what tokens got from each other, [T,H,D]."""
        return self.out(attended.flatten(-2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate x) * up x) (Shazeer 2020); with a `tile` so many tokens at a time."""

    op: Op = SWIGLU

    def __init__(self, shape: Model, tile: int = 0) -> None:
        super().__init__()
        self.tile = tile
        self.gate = Linear(shape.hidden, shape.ffn)
        self.up = Linear(shape.hidden, shape.ffn)
        self.down = Linear(shape.ffn, shape.hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the layer's output [T,C]; it routes nothing."""
        return (in_tiles(self._swiglu, x, self.tile, self.parameters()) if self.tile else self._swiglu(x))[0], None

    def _swiglu(self, x: Tensor) -> tuple[Tensor]:
        return (self.down(self.op(self.gate(x), self.up(x))),)


class Layer(nn.Module):
    """One pre-norm transformer layer, with any feed-forward layer."""

    def __init__(self, shape: Model, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.ffn = ffn

    def forward(self, x: Tensor, by: Rotation, attend: Attend) -> tuple[Tensor, Routed | None]:
        """Return the residual stream [T,C] after the layer, and what its feed-forward layer routed."""
        return self.after(x, attend(*self.before(x, by)))

    def before(self, x: Tensor, by: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T,H,D], k and v [T,G,D] of x [T,C]."""
        return self.attention.before(self.attention_norm(x), by)

    def after(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Routed | None]:
        """Return what `forward` does, from the stream before the layer and what tokens got from each other."""
        x = x + self.attention.after(attended)
        change, routed = self.ffn(self.ffn_norm(x))
        return x + change, routed
