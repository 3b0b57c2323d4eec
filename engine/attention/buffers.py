"""What rings send from and receive into: two alternating buffers of a kind, for all rounds and layers.

```
 round      0        1        2
 buffer 0   ours ->  .. <-    .. ->       what is sent is also what the round computes with
 buffer 1   .. <-    .. ->    .. <-
```
They are those of one layout. Another layout's take their place, so what is held is what the memory model counts for
the micro-batch that runs (`cost.activations.ring_bytes`). Letters: G key and value heads, D head size.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.layout import Layout
from engine.planner.schedule import Kind


class _Shape(NamedTuple):
    """What buffers depend on: the tokens of each ring's largest shard, and those tensors."""

    tokens: tuple[int, ...]
    heads: tuple[int, ...]  # G, D
    dtype: torch.dtype
    device: torch.device


class Buffers:
    """The buffers of the rings of one layout; one rank's rings share them, one attention call at a time."""

    def __init__(self) -> None:
        self._shapes: dict[Kind, _Shape] = {}
        self._pairs: dict[Kind, list[tuple[Tensor, Tensor]]] = {}

    def fit(self, kind: Kind, layout: Layout, like: Tensor) -> None:
        """Make room for the rings of a layout, for tensors such as `like` [T,G,D], unless there is just that."""
        largest = tuple(-(-ring.length // ring.degree) for ring in layout.rings)
        shape = _Shape(largest, tuple(like.shape[1:]), like.dtype, like.device)
        if self._shapes.get(kind) == shape:
            return
        for stale in ("kv", "dkv") if kind == "kv" else (kind,):  # before there is more: memory holds one layout's
            self._shapes.pop(stale, None)
            self._pairs.pop(stale, None)
        self._pairs[kind] = [(_room(shape, tokens), _room(shape, tokens)) for tokens in largest]
        self._shapes[kind] = shape

    def take(self, kind: Kind, ring: int, turn: int, tokens: int) -> Tensor:
        """Return a ring's buffer of an even or odd turn, cut to a part's tokens: [2,tokens,G,D], contiguous."""
        flat = self._pairs[kind][ring][turn % 2]
        shape = (2, tokens, *self._shapes[kind].heads)
        return flat[: prod(shape)].view(shape)


def _room(shape: _Shape, tokens: int) -> Tensor:
    return torch.empty(prod((2, tokens, *shape.heads)), dtype=shape.dtype, device=shape.device)
