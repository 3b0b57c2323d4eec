"""The attention context of a micro-batch: how a model attends, and communicates with other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from engine.attention.comm import Comm
from engine.attention.kernels.call import Kernel
from engine.attention.layout import Layout
from engine.attention.prefix import Prefixes
from engine.attention.ring import attend
from engine.attention.sums import sum_over_rings
from engine.models.common.attention import Shards, SliceOfShard


@dataclass(frozen=True)
class AttentionContext:
    """Attention for one micro-batch on one rank, including its rings: implements `PackedAttention` for a model.

    `comm` may be None if the layout has no rings. `prefixes` are shared by all micro-batches of a step.
    """

    layout: Layout
    comm: Comm | None
    kernel: Kernel
    prefixes: Prefixes = field(default_factory=Prefixes)
    layer: int = 0

    def at(self, layer: int) -> AttentionContext:
        """Return the attention of one layer."""
        return replace(self, layer=layer)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute causal attention within each sequence: q [T,H,D], k and v [T,G,D] to the output [T,H,D]."""
        return attend(q, k, v, self.layout, self.comm, self.kernel, self.prefixes, self.layer)

    def shards(self, device: torch.device) -> Shards:
        """Return the shards of this rank as tensors on `device`. An idle micro-batch has none."""
        rows = self.layout.shards
        sizes = torch.tensor([shard.stop - shard.start for shard in rows], dtype=torch.int64)
        lengths = torch.tensor([shard.length for shard in rows], dtype=torch.int64)
        ids = torch.arange(len(rows)).repeat_interleave(sizes)
        if device.type == "cuda":  # from pinned memory, so that the host does not wait for the GPU
            ids, lengths = ids.pin_memory(), lengths.pin_memory()
        return Shards(ids.to(device, non_blocking=True), lengths.to(device, non_blocking=True))

    def sum_over_sequences(self, counts: Tensor) -> Tensor:
        """Sum integers over all shards of each sequence, or of its slice: [S,N] to [S,N], one row per local shard.

        Collective: all ranks of a ring must call it.
        """
        return sum_over_rings(counts, self.layout, self.comm)

    def slices(self) -> list[SliceOfShard]:
        """Return the shards of sequences that run in several slices."""
        rings = iter(self.layout.rings)
        shards = [(number, next(rings)) for number, rows in enumerate(self.layout.shards) if rows.ring]
        return [
            SliceOfShard(number, ring.rows, self.prefixes.totals(ring.shard.sequence), last=not ring.shard.later)
            for number, ring in shards
            if ring.shard.sliced
        ]
