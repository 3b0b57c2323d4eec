"""How the tokens of a micro-batch meet: in attention, and in sums over a sequence's shards. All that a model knows of
other ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.attention.comm import Comm
from engine.attention.kernels.call import Kernel
from engine.attention.layout import Layout, ShardRows
from engine.attention.ring import attend
from engine.attention.sums import summed


@dataclass(frozen=True)
class Meeting:
    """A micro-batch's packed tokens, and the rings that share them; `comm` may be None where there is no ring."""

    layout: Layout
    comm: Comm | None
    kernel: Kernel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return causal attention within each sequence, [T,H,D], of q [T,H,D], k and v [T,G,D]."""
        return attend(q, k, v, self.layout, self.comm, self.kernel)

    @property
    def shards(self) -> tuple[ShardRows, ...]:
        """Return where each shard of a sequence lies in the packed tokens; an idle micro-batch has none."""
        return self.layout.shards

    def summed(self, counts: Tensor) -> Tensor:
        """Return counts [shards, N] with those of each sequence's other shards added; all its ranks call it."""
        return summed(counts, self.layout, self.comm)
