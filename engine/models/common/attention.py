"""Grouped-query attention with rotary embedding, and the interface of the attention function that a model calls.

Tokens are packed: the sequences of a micro-batch are concatenated in one dimension, and each token attends only to
tokens of its own sequence.

Letters: T tokens, C hidden size, H query heads, G key and value heads, D head size, S sequences (or shards of them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config.schema import Model
from engine.models.common.norm import RMSNorm
from engine.models.common.op import Op
from engine.models.common.part import Enter, as_it_is
from engine.models.common.pointwise import ROTATE
from engine.models.common.rope import Rotation
from engine.models.common.skip_init import Linear


class Shards(NamedTuple):
    """The sequences that packed tokens belong to, or the shards of sequences on this rank."""

    ids: Tensor  # int64 [N], the shard of each of the first N tokens; later tokens belong to no sequence
    lengths: Tensor  # int64 [S], tokens of the whole sequence of each shard


@dataclass(eq=False)
class SliceTotals:
    """What the slices of one sequence have in common for the loss that balances experts (models/experts/balance.py).

    Complete after the forward pass of the last slice, which comes before the first backward pass. L layers, E experts.
    """

    counts: Tensor | int = 0  # int64 [N], sum over the slices so far of what `sum_over_sequences` returned for each
    probabilities: Tensor | float = 0.0  # [L,E], sum over this rank's tokens of the slices so far
    weight: Tensor | None = None  # [L,E], the gradient of the loss by each of these sums; None before the last slice


class SliceOfShard(NamedTuple):
    """A shard that is part of a slice of a sequence."""

    shard: int  # index in `Shards.lengths`
    rows: slice  # of the packed tokens, known to the host
    totals: SliceTotals
    last: bool


class PackedAttention(Protocol):
    """The attention function of a micro-batch, which the caller of a model passes to it.

    Implementations: `LocalAttention` for one device, `AttentionContext` for rings.
    """

    def at(self, layer: int) -> PackedAttention:
        """Return the attention function of one layer, by its number in the whole model."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute causal attention within each sequence: q [T,H,D], k and v [T,G,D] to the output [T,H,D]."""

    def shards(self, device: torch.device) -> Shards:
        """Return the sequences (or shards of them) that the tokens belong to."""

    def sum_over_sequences(self, counts: Tensor) -> Tensor:
        """Sum integers over all shards of each sequence, or of its slice: [S,N] to [S,N], one row per local shard."""

    def slices(self) -> list[SliceOfShard]:
        """Return the shards of sequences that run in several slices."""


class LocalAttention:
    """Attention on one device with PyTorch's operator. A new sequence starts wherever `positions` [T] is 0."""

    def __init__(self, positions: Tensor) -> None:
        starts = (positions == 0).nonzero().flatten().tolist()
        self._lengths = [stop - start for start, stop in pairwise([*starts, len(positions)])]

    def at(self, layer: int) -> LocalAttention:
        """Return this function for every layer."""
        return self

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute causal attention within each sequence: q [T,H,D], k and v [T,G,D] to the output [T,H,D]."""
        sequences = zip(*(x.transpose(0, 1).split(self._lengths, dim=1) for x in (q, k, v)), strict=True)
        outs = [
            F.scaled_dot_product_attention(q_one, k_one, v_one, is_causal=True, enable_gqa=True)
            for q_one, k_one, v_one in sequences
        ]
        return torch.cat(outs, dim=1).transpose(0, 1) if outs else q

    def shards(self, device: torch.device) -> Shards:
        """Return the sequences that the tokens belong to, as tensors on `device`."""
        lengths = torch.tensor(self._lengths, dtype=torch.int64)
        return Shards(torch.arange(len(lengths)).repeat_interleave(lengths).to(device), lengths.to(device))

    def sum_over_sequences(self, counts: Tensor) -> Tensor:
        """Return `counts` [S,N] unchanged, because every sequence is complete on this device."""
        return counts

    def slices(self) -> list[SliceOfShard]:
        """Return no shards: sequences do not run in slices."""
        return []


class Attention(nn.Module):
    """The projections before and after attention. The caller computes attention itself, with a `PackedAttention`."""

    op: Op = ROTATE
    enter: Enter = staticmethod(as_it_is)
    leave: Callable[[Tensor], Tensor] = staticmethod(as_it_is)

    def __init__(self, shape: Model, tp: int = 1, qk_norm: bool = False) -> None:
        """With tensor parallelism of degree `tp`, H and G are the heads of one device.

        `qk_norm` normalises the queries and keys of each head, before the rotary embedding.
        """
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = (heads // tp * shape.head_dim for heads in (shape.heads, shape.kv_heads))
        self.q, self.k, self.v = (Linear(shape.hidden, width) for width in (queries, keys, keys))
        self.out = Linear(queries, shape.hidden)
        self.q_norm, self.k_norm = (
            RMSNorm(shape.head_dim, shape.norm_eps) if qk_norm else nn.Identity() for _ in range(2)
        )

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [T,C] to q [T,H,D], k and v [T,G,D], and apply the rotary embedding to q and k."""
        x = self.enter(x, len(rotation[0]))
        q, k, v = (projection(x).unflatten(-1, (-1, self.head_dim)) for projection in (self.q, self.k, self.v))
        return self.op(self.q_norm(q), *rotation), self.op(self.k_norm(k), *rotation), v

    def output(self, attended: Tensor) -> Tensor:
        """Project the output of attention [T,H,D] to [T,C]."""
        return self.leave(self.out(attended.flatten(-2)))
