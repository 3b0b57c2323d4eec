"""The buffers that rings send from and receive into.

Each ring has two buffers per kind of message (K,V or dK,dV), which alternate from round to round; of K,V two for each
round of a call, because those of the next call arrive during a call. A ring never has more of them than rounds. All
layers use the same buffers.

```
 round      0        1        2
 buffer 0   own ->   .. <-    .. ->       -> sent, and used by the computation of the round;  <- received
 buffer 1   .. <-    .. ->    .. <-
```
The buffers of the previous micro-batch are freed when the layout changes, so only those of the current micro-batch use
memory, as `cost.activations.ring_bytes` assumes.

Letters: G key and value heads, D head size.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.layout import Layout
from engine.planner.plan.schedule import Kind


class _Shape(NamedTuple):
    """Everything that determines the size of buffers."""

    tokens: tuple[int, ...]  # most tokens that a part of each ring sends
    counts: tuple[int, ...]  # buffers of each ring
    heads: tuple[int, ...]  # G, D
    dtype: torch.dtype
    device: torch.device


class Buffers:
    """Send and receive buffers for the rings of one layout. Only one attention call may use them at a time."""

    def __init__(self) -> None:
        self._shapes: dict[Kind, _Shape] = {}
        self._buffers: dict[Kind, list[list[Tensor]]] = {}  # of each ring

    def fit(self, kind: Kind, layout: Layout, like: Tensor) -> None:
        """Allocate buffers of one kind for all rings of `layout`, with the heads, dtype and device of `like` [T,G,D].

        Existing buffers of the same shape are reused. Allocating new "kv" buffers also frees the "dkv" buffers.
        """
        largest = tuple(ring.largest for ring in layout.rings)
        most = 2 * layout.rounds_per_call if kind == "kv" else 2
        counts = tuple(min(most, ring.rounds("forward")) for ring in layout.rings)
        shape = _Shape(largest, counts, tuple(like.shape[1:]), like.dtype, like.device)
        if self._shapes.get(kind) == shape:
            return
        # Free the old buffers before allocating new ones, so that two layouts never use memory at once.
        for stale in ("kv", "dkv") if kind == "kv" else (kind,):
            self._shapes.pop(stale, None)
            self._buffers.pop(stale, None)
        sizes = [prod((2, tokens, *shape.heads)) for tokens in largest]
        self._buffers[kind] = [
            [like.new_empty(size) for _ in range(count)] for size, count in zip(sizes, counts, strict=True)
        ]
        self._shapes[kind] = shape

    def take(self, kind: Kind, ring: int, turn: int, tokens: int) -> Tensor:
        """Return a contiguous view [2,tokens,G,D] of a ring's buffer for a turn; the buffers take turns.

        `ring` is the ring's index in the layout; `tokens` is at most `RingShard.largest`. `fit` must
        have allocated buffers of this kind.
        """
        flat = self._buffers[kind][ring][turn % self._shapes[kind].counts[ring]]
        shape = (2, tokens, *self._shapes[kind].heads)
        return flat[: prod(shape)].view(shape)
