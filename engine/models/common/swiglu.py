"""The SwiGLU feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn

from engine.config.schema import Model
from engine.models.common.pointwise import SWIGLU, Op
from engine.models.common.skip_init import Linear
from engine.models.common.tiles import in_tiles


class FeedForward(nn.Module):
    """Computes down(silu(gate(x)) * up(x)) of x [tokens, hidden size] (Shazeer 2020)."""

    op: Op = SWIGLU
    tile: int = 0  # tokens per tile (tiles.py), to save memory; 0 computes all tokens at once

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.gate = Linear(shape.hidden, shape.ffn)
        self.up = Linear(shape.hidden, shape.ffn)
        self.down = Linear(shape.ffn, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x [tokens, hidden size], in tiles if `tile` is set; the result has the shape of x."""
        (out,) = in_tiles(self._swiglu, x, self.tile, self.parameters()) if self.tile else self._swiglu(x)
        return out

    def _swiglu(self, x: Tensor) -> tuple[Tensor]:
        return (self.down(self.op(self.gate(x), self.up(x))),)
