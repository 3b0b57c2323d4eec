"""Where the shards of a micro-batch lie in a rank's packed tokens, and which of them are in a ring. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from engine.planner.plan import MicroBatch, Shard
from engine.planner.schedule import Block, Direction, Transfer, block, kv_part, rounds, shard_tokens, transfers


@dataclass(frozen=True)
class RingShard:
    """This rank's shard of a sequence that other ranks share; tokens offset .. offset + tokens of its packed tokens."""

    offset: int
    tokens: int
    length: int  # of the whole sequence
    degree: int
    part: int
    next_rank: int
    previous_rank: int

    @property
    def rows(self) -> slice:
        """Return where the shard lies in the rank's packed tokens."""
        return slice(self.offset, self.offset + self.tokens)

    def block(self, round_: int) -> Block:
        """Return which of our queries meet which keys of the part that we hold in a round."""
        return block(self.length, self.degree, self.part, kv_part(self.degree, self.part, round_))

    def transfers(self, round_: int, direction: Direction) -> tuple[Transfer, ...]:
        """Return what we send and receive in a round."""
        return transfers(self.degree, self.part, round_, direction)

    def tokens_of(self, part: int) -> int:
        """Return how many tokens another part holds."""
        return shard_tokens(self.length, self.degree, part)


class ShardRows(NamedTuple):
    """Where a shard lies in the packed tokens, the length of its whole sequence, and whether a ring shares that."""

    start: int
    stop: int
    length: int
    ring: bool


@dataclass(frozen=True)
class Layout:
    """A rank's packed tokens: shards one after the other; `bounds` are those of the shards that are not empty."""

    tokens: int
    bounds: tuple[int, ...]
    rings: tuple[RingShard, ...]
    shards: tuple[ShardRows, ...]  # all of them, in rings and not; the tokens of an idle micro-batch are of none

    def rounds(self, direction: Direction) -> int:
        """Return the rounds of the largest ring; all rings advance together. Without rings there is one."""
        return max((rounds(ring.degree, direction) for ring in self.rings), default=1)


def layout(micro: MicroBatch) -> Layout:
    """Return the layout of a micro-batch that has at least one shard. Shards may be empty."""
    sizes = [shard_tokens(shard.length, shard.degree, shard.part) for shard in micro.shards]
    offsets = list(accumulate(sizes, initial=0))
    rings = (
        _ring_shard(shard, offset, size)
        for shard, offset, size in zip(micro.shards, offsets, sizes, strict=False)
        if shard.degree > 1
    )
    rows = (
        ShardRows(offset, offset + size, shard.length, shard.degree > 1)
        for shard, offset, size in zip(micro.shards, offsets, sizes, strict=False)
    )
    return Layout(offsets[-1], tuple(sorted(set(offsets))), tuple(rings), tuple(rows))


def whole(tokens: int) -> Layout:
    """Return the layout of one whole sequence, which may be empty."""
    rows = (ShardRows(0, tokens, tokens, ring=False),) if tokens else ()
    return Layout(tokens, tuple(sorted({0, tokens})), (), rows)


def idle(tokens: int) -> Layout:
    """Return the layout of an idle micro-batch: its tokens belong to no sequence and count for nothing."""
    return Layout(tokens, tuple(sorted({0, tokens})), (), ())


def _ring_shard(shard: Shard, offset: int, tokens: int) -> RingShard:
    return RingShard(
        offset=offset,
        tokens=tokens,
        length=shard.length,
        degree=shard.degree,
        part=shard.part,
        next_rank=shard.ring[(shard.part + 1) % shard.degree],
        previous_rank=shard.ring[(shard.part - 1) % shard.degree],
    )
