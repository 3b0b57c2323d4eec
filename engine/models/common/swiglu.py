"""The SwiGLU feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from engine.config.schema import Model
from engine.models.common.op import Op
from engine.models.common.part import Enter, as_it_is
from engine.models.common.pointwise import SWIGLU
from engine.models.common.skip_init import Linear
from engine.models.common.tiles import in_tiles


class FeedForward(nn.Module):
    """Computes down(silu(gate(x)) * up(x)) of x [tokens, hidden size] (Shazeer 2020)."""

    op: Op = SWIGLU
    tile: int = 0  # tokens per tile (tiles.py), to save memory; 0 computes all tokens at once

    enter: Enter = staticmethod(as_it_is)
    leave: Callable[[Tensor], Tensor] = staticmethod(as_it_is)

    def __init__(self, shape: Model, tp: int = 1) -> None:
        super().__init__()
        self.tp = tp
        self.gate = Linear(shape.hidden, shape.ffn // tp)
        self.up = Linear(shape.hidden, shape.ffn // tp)
        self.down = Linear(shape.ffn // tp, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to x [tokens, hidden size], in tiles if `tile` is set; the result has the shape of x."""
        tile = -(-self.tile // self.tp)  # of the own tokens: those of all devices are together in a tile
        (out,) = in_tiles(self._swiglu, x, tile, self.parameters()) if tile else self._swiglu(x)
        return out

    def _swiglu(self, x: Tensor) -> tuple[Tensor]:
        x = self.enter(x)
        return (self.leave(self.down(self.op(self.gate(x), self.up(x)))),)
