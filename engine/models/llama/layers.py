"""The parts of a LLaMA layer; single-device code on packed tokens.

Letters: T tokens, C hidden size, H query heads, G key and value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config.schema import Model

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [T,H,D], k [T,G,D], v [T,G,D] -> [T,H,D]
Rotation = tuple[Tensor, Tensor]  # cos and sin, [T,1,D]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in at least float32 (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised x [T,C] in its dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """Return cos and sin of the rotary angles of integer positions [T], in at least float32.

    Angles are float64: in float32 they are off by 0.06 rad between neighbours at 1M tokens.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.to(torch.float64)[:, None] * theta**-exponents  # [T, D/2]
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    wide = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(wide), angles.sin().to(wide)


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate each pair (i, i + D/2) of x [T,H,D] by its angle, as Hugging Face's weights expect.

    bf16 is rotated in float32 and rounded once: with cos and sin in bf16 the error of q.k was 1.5 to 2 times as large.
    """
    cos, sin = by
    low, high = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-high, low), dim=-1) * sin).to(x.dtype)


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

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T,C]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor, by: Rotation, attend: Attend) -> Tensor:
        """Return the residual stream [T,C] after the layer."""
        return self.after(x, attend(*self.before(x, by)))

    def before(self, x: Tensor, by: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T,H,D], k and v [T,G,D] of x [T,C]."""
        return self.attention.before(self.attention_norm(x), by)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after the layer, from that before it and what tokens got from each other."""
        x = x + self.attention.after(attended)
        return x + self.ffn(self.ffn_norm(x))  # type: ignore[no-any-return]
