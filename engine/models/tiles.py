"""A layer's part over tiles of its tokens, of which nothing is kept for the backward pass but the input.

          forward                    backward
 x  |t0|t1|t2|t3| -> out     t0 anew, its gradients | t1 anew, its gradients | ...

Each tile is computed twice, and what is as wide as the part inside is there for one tile only. The gradients of the
weights are summed over tiles in at least float32: in bf16 each of hundreds of tiles would round the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.dtypes import wider

Part = Callable[[Tensor], tuple[Tensor, ...]]  # of a tile's tokens, and of each token alone


def in_tiles(part: Part, x: Tensor, tile: int, weights: Iterable[nn.Parameter]) -> tuple[Tensor, ...]:
    """Return part(x), computed `tile` tokens at a time; `weights` are all that the part has."""
    kept = _Kept.apply(x)
    return _Tiled.apply(part, tile, kept.grad_fn, kept, *weights)  # type: ignore[no-any-return]


class _Kept(torch.autograd.Function):
    """Keeps the input before the tiles are computed: a layer that is recomputed goes as far as this, so that each tile
    is computed anew once and not twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        return gradient[0]


class _Tiled(torch.autograd.Function):
    """Keeps which parameters there are, not what they hold: ZeRO-3 gathers that anew for the backward pass."""

    @staticmethod
    def forward(ctx: Any, part: Part, tile: int, kept: Any, x: Tensor, *weights: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.part, ctx.tile, ctx.kept, ctx.weights = part, tile, kept, weights
        outs = tuple(map(torch.cat, zip(*(part(tokens) for tokens in x.split(tile)), strict=True)))
        ctx.mark_non_differentiable(*(out for out in outs if not out.is_floating_point()))
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.kept.saved_tensors
        dx, dweights = torch.empty_like(x), [torch.zeros_like(one, dtype=wider(one.dtype)) for one in ctx.weights]
        tiles = zip(*(tensor.split(ctx.tile) for tensor in (x, dx, *gradients)), strict=True)
        for tokens, dtokens, *douts in tiles:
            found = _gradients(ctx.part, tokens, ctx.weights, douts)
            dtokens.copy_(found[0])
            for total, one in zip(dweights, found[1:], strict=True):
                total += one
            del found, one  # or they would stand beside what is made of the sums
        return None, None, None, dx, *(dweights.pop(0).to(one.dtype) for one in ctx.weights)


def _gradients(part: Part, x: Tensor, weights: tuple[nn.Parameter, ...], douts: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of a tile's input and of all weights; `douts` are those of its outputs."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        pairs = [(out, dout) for out, dout in zip(part(x), douts, strict=True) if out.requires_grad]
    return torch.autograd.grad([out for out, _ in pairs], (x, *weights), [dout for _, dout in pairs])
