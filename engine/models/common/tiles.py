"""Computes a function of tokens in tiles, to save memory: only its input is saved for the backward pass.

          forward                    backward
 x  |t0|t1|t2|t3| -> out     recompute t0, its gradients | recompute t1, its gradients | ...

Each tile is computed twice, and intermediate tensors exist for one tile at a time. The gradients of the weights are
summed over tiles in at least float32: in bf16 the sum would be rounded once per tile, and there are hundreds of tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.dtypes import wider

# A function of tokens [T,...]. Row t of each output [T,...] depends only on token t.
Part = Callable[[Tensor], tuple[Tensor, ...]]


def in_tiles(part: Part, x: Tensor, tile: int, weights: Iterable[nn.Parameter]) -> tuple[Tensor, ...]:
    """Compute `part(x)` for x [T,...], `tile` tokens at a time. `weights` must be all parameters that `part` uses."""
    kept = _Kept.apply(x)
    return _Tiled.apply(part, tile, kept.grad_fn, kept, *weights)  # type: ignore[no-any-return]


class _Kept(torch.autograd.Function):
    """Saves the input in a separate operation, before the tiles.

    When a layer is recomputed, PyTorch stops at the last tensor that was saved. Here that tensor is the input of the
    tiles, so recompute does not run them, and each tile is computed twice instead of three times.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Tensor:
        return gradient[0]


class _Tiled(torch.autograd.Function):
    """Computes the tiles; the backward pass recomputes them one by one from the input that `kept` saved.

    Saves references to parameters, not their values: ZeRO-3 gathers the values again for the backward pass.
    """

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
        dx, dweights = torch.empty_like(x), dict[int, Tensor]()
        tiles = zip(*(tensor.split(ctx.tile) for tensor in (x, dx, *gradients)), strict=True)
        for tokens, dtokens, *douts in tiles:
            found = _gradients(ctx.part, tokens, ctx.weights, douts)
            assert found[0] is not None
            dtokens.copy_(found[0])
            for number, one in enumerate(found[1:]):
                if one is None:  # the product has added it to the sum over micro-batches
                    continue
                if number not in dweights:
                    dweights[number] = torch.zeros_like(one, dtype=wider(one.dtype))
                dweights[number] += one
            del found, one  # free the gradients before the results below are allocated
        numbers = range(len(ctx.weights))
        return (
            None,
            None,
            None,
            dx,
            *(dweights.pop(n).to(ctx.weights[n].dtype) if n in dweights else None for n in numbers),
        )


def _gradients(
    part: Part, x: Tensor, weights: tuple[nn.Parameter, ...], douts: list[Tensor]
) -> tuple[Tensor | None, ...]:
    """Recompute a tile, and return the gradients of its input and of all weights.

    `douts` are the gradients of the outputs of the tile.
    """
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        pairs = [(out, dout) for out, dout in zip(part(x), douts, strict=True) if out.requires_grad]
    outs, gradients = zip(*pairs, strict=True)
    return torch.autograd.grad(outs, (x, *weights), gradients, allow_unused=True)
