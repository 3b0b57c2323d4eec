"""The parts of a LLaMA layer; single-device code on packed tokens.

Letters: T tokens, C hidden size, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config.schema import Model
from engine.dtypes import wider
from engine.models.rope import Rotation, rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [T,H,D], k [T,G,D], v [T,G,D] -> [T,H,D]


class Routed(NamedTuple):
    """What the router of a layer of E experts said of T tokens, and the k that it chose for each."""

    logits: Tensor  # [T,E] in at least float32
    chosen: Tensor  # [T,k] int64


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in at least float32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x [T,C] in its dtype."""
        wide = x.to(wider(x.dtype))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary embedding; how tokens meet is the caller's `attend`."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def before(self, x: Tensor, by: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T,H,D], k and v [T,G,D] of x [T,C]."""
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        return rotate(q, by), rotate(k, by), v

    def after(self, attended: Tensor) -> Tensor:
        """Return the output [T,C] of what tokens got from each other, [T,H,D]."""
        return self.out(attended.flatten(-2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate x) * up x) (Shazeer 2020)."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the layer's output [T,C]; it routes nothing."""
        return self.down(F.silu(self.gate(x)) * self.up(x)), None


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
