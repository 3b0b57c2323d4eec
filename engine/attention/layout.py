"""The layout of a micro-batch: the position of each shard in a rank's packed tokens, and the shards that are in rings.

The rounds and transfers of a ring are defined in `engine/planner/plan/schedule.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from engine.attention.kernels.call import Call
from engine.planner.plan.schedule import Block, Direction, Transfer, block, kv_part, rounds, shard_tokens, transfers
from engine.planner.plan.step_plan import MicroBatch


@dataclass(frozen=True)
class RingShard:
    """This rank's shard of a sequence that is split over a ring."""

    offset: int  # of its first token in the rank's packed tokens
    tokens: int
    length: int  # tokens of the whole sequence
    degree: int
    part: int  # position of this rank in the ring
    next_rank: int  # HDP ranks, as in the plan
    previous_rank: int

    @property
    def rows(self) -> slice:
        """The rows of the shard in the rank's packed tokens."""
        return slice(self.offset, self.offset + self.tokens)

    def block(self, round_: int) -> Block:
        """Return which queries of this shard attend to which keys in a round, as offsets into the two shards.

        The keys are those of the shard whose K,V this rank holds in that round; in round 0 its own.
        """
        return block(self.length, self.degree, self.part, kv_part(self.degree, self.part, round_))

    def transfers(self, round_: int, direction: Direction) -> tuple[Transfer, ...]:
        """Return the messages that this rank sends and receives in a round, in posting order."""
        return transfers(self.degree, self.part, round_, direction)

    def tokens_of(self, part: int) -> int:
        """Return the number of tokens of the shard at position `part` of the ring."""
        return shard_tokens(self.length, self.degree, part)


class RingBlock(NamedTuple):
    """One ring's part of a round: queries `rows` of this rank attend to keys 0 .. keys - 1 of the shard whose K,V the
    rank holds in that round. Neither is empty."""

    ring: int  # index in `Layout.rings`
    rows: slice
    keys: int


class ShardRows(NamedTuple):
    """A shard as the rows start .. stop - 1 of the rank's packed tokens."""

    start: int
    stop: int
    length: int  # tokens of the whole sequence
    ring: bool  # whether the sequence is split over a ring


@dataclass(frozen=True)
class Layout:
    """The packed tokens of a rank in one micro-batch: its shards, one after the other."""

    tokens: int
    bounds: tuple[int, ...]  # cumulative lengths, from 0, of the shards that are not empty
    rings: tuple[RingShard, ...]
    shards: tuple[ShardRows, ...]  # all shards, with or without a ring; empty for an idle micro-batch

    def rounds(self, direction: Direction) -> int:
        """Return the number of rounds of the largest ring, because all rings advance together; 1 without rings."""
        return max((rounds(ring.degree, direction) for ring in self.rings), default=1)

    def blocks(self, round_: int) -> list[RingBlock]:
        """Return the blocks of a round after round 0, which are computed in one kernel call.

        Empty blocks are left out: they would crash PyTorch's CPU kernel (SIGFPE).
        """
        blocks = []
        for number, ring in enumerate(self.rings):
            if round_ < ring.degree and not (block := ring.block(round_)).empty:
                rows = slice(ring.offset + block.q_start, ring.offset + block.q_stop)
                blocks.append(RingBlock(number, rows, block.kv_stop))
        return blocks

    def call(self, round_: int, overlapped: bool = False) -> Call | None:
        """Return the kernel call of a round, or None if the rank computes nothing in it.

        Round 0 is one causal call over all shards; a later round packs its blocks one after the other. `overlapped`
        says that transfers run at the same time.
        """
        if round_ == 0:
            return Call(self.bounds, self.bounds, True, overlapped) if self.tokens else None
        blocks = self.blocks(round_)
        queries = accumulate((block.rows.stop - block.rows.start for block in blocks), initial=0)
        keys = accumulate((block.keys for block in blocks), initial=0)
        return Call(tuple(queries), tuple(keys), False, overlapped) if blocks else None


def layout(micro: MicroBatch) -> Layout:
    """Create the layout of a micro-batch with at least one shard. Shards may be empty."""
    sizes = [shard_tokens(shard.length, shard.degree, shard.part) for shard in micro.shards]
    offsets = list(accumulate(sizes, initial=0))
    rings, rows = [], []
    for shard, offset, size in zip(micro.shards, offsets, sizes, strict=False):
        rows.append(ShardRows(offset, offset + size, shard.length, shard.degree > 1))
        if shard.degree > 1:
            following, previous = (shard.ring[(shard.part + step) % shard.degree] for step in (1, -1))
            rings.append(RingShard(offset, size, shard.length, shard.degree, shard.part, following, previous))
    return Layout(offsets[-1], tuple(sorted(set(offsets))), tuple(rings), tuple(rows))


def unsplit(tokens: int) -> Layout:
    """Create the layout of one unsplit sequence of `tokens` tokens, which may be 0."""
    rows = (ShardRows(0, tokens, tokens, ring=False),) if tokens else ()
    return Layout(tokens, tuple(sorted({0, tokens})), (), rows)


def idle(tokens: int) -> Layout:
    """Create the layout of an idle micro-batch: its tokens attend to each other, but belong to no shard and do not
    affect the loss."""
    return Layout(tokens, tuple(sorted({0, tokens})), (), ())
