"""The layout of a micro-batch: the position of each shard in a rank's packed tokens, and the shards that are in rings.

The rounds, calls and transfers of a ring, slices and teams are defined in `engine/planner/plan/schedule.py`. In a team,
a rank also computes with the queries of its mates: their rows follow the rank's own packed tokens.

```
 rows   | shard 0 | shard 1 | shard 2 | mate of shard 1 | mate of shard 2 |
        0            own tokens       T                                   R
```
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from engine.attention.kernels.call import Call
from engine.planner.plan.schedule import (
    Direction,
    Kind,
    Transfer,
    blocks,
    call_of_round,
    call_start,
    kv_part,
    mates,
    prefix_tokens,
    rounds,
    shard_tokens,
    transfers,
)
from engine.planner.plan.step_plan import MicroBatch, Shard


class Mate(NamedTuple):
    """Another part of this rank's team."""

    part: int
    rank: int  # HDP rank
    rows: slice  # of its queries


@dataclass(frozen=True)
class RingShard:
    """This rank's shard of a sequence that is split over a ring, or that runs in slices."""

    shard: Shard
    offset: int  # of its first token in the rank's packed tokens
    tokens: int
    mates: tuple[Mate, ...]

    @property
    def rows(self) -> slice:
        """The rows of the shard in the rank's packed tokens."""
        return slice(self.offset, self.offset + self.tokens)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each slice of the sequence so far, on all ranks: the earlier ones, and the shard's own."""
        return *self.shard.earlier, self.shard.length

    @property
    def prefix(self) -> int:
        """Tokens of the earlier slices of the sequence on this rank."""
        return prefix_tokens(self.shard.earlier, self.shard.degree, self.shard.part)

    @property
    def slices(self) -> list[int]:
        """Tokens of each slice of the sequence so far on this rank: those of its prefix, and of the shard."""
        return [shard_tokens(length, self.shard.degree, self.shard.part) for length in self.lengths]

    @property
    def largest(self) -> int:
        """At least as many tokens as the prefix and the shard of any part have: the largest shard of each slice."""
        return sum(-(-length // self.shard.degree) for length in self.lengths)

    def rank(self, direction: Direction, step: int) -> int:
        """Return the HDP rank to which messages go (`step` 1), or from which they come (-1)."""
        hop = step if direction == "counts" else step * self.shard.team
        return self.shard.ring[(self.shard.part + hop) % self.shard.degree]

    def kv_part(self, round_: int) -> int:
        """Return the part whose K,V this rank computes with in a round."""
        return kv_part(self.shard.degree, self.shard.part, round_, self.shard.team)

    def rounds(self, direction: Direction) -> int:
        """Return the number of rounds in which this rank computes or sends."""
        return rounds(self.shard.degree, direction, self.shard.team)

    def transfers(self, round_: int, direction: Direction) -> tuple[Transfer, ...]:
        """Return the messages that this rank sends and receives in a round, in posting order."""
        return transfers(self.shard.degree, self.shard.part, round_, direction, self.shard.team)

    def transfer(self, kind: Kind, round_: int, direction: Direction) -> Transfer | None:
        """Return the message of one kind that this rank sends and receives in a round, if any."""
        return next((one for one in self.transfers(round_, direction) if one.kind == kind), None)

    def tokens_of(self, part: int) -> int:
        """Return the tokens of the prefix and the shard of part `part`."""
        return prefix_tokens(self.lengths, self.shard.degree, part)


class RingBlock(NamedTuple):
    """One ring's part of a call: queries `rows` attend to the first keys[i] keys of the part whose K,V the rank has in
    the call's round i. Neither is empty."""

    ring: int  # index in `Layout.rings`
    rows: slice
    keys: tuple[int, ...]


class ShardRows(NamedTuple):
    """A shard as the rows start .. stop - 1 of the rank's packed tokens."""

    start: int
    stop: int
    length: int  # tokens of the whole sequence
    ring: bool  # whether it is in `Layout.rings`


@dataclass(frozen=True)
class Layout:
    """The packed tokens of a rank in one micro-batch: its shards, one after the other."""

    tokens: int  # T
    bounds: tuple[int, ...]  # cumulative lengths, from 0, of the shards that are not empty
    rings: tuple[RingShard, ...]
    shards: tuple[ShardRows, ...]  # all shards, with or without a ring; empty for an idle micro-batch
    rounds_per_call: int = 1  # at most

    @property
    def rows(self) -> int:
        """Rows R of queries: own tokens, and those of mates."""
        return max((mate.rows.stop for ring in self.rings for mate in ring.mates), default=self.tokens)

    @property
    def teams(self) -> bool:
        """Whether some ring has teams. Its members exchange messages, also if the rows of some are empty."""
        return any(ring.mates for ring in self.rings)

    def rounds(self, direction: Direction) -> int:
        """Return the number of rounds of the largest ring, because all rings advance together; 1 without rings."""
        return max((ring.rounds(direction) for ring in self.rings), default=1)

    def rounds_of(self, call: int) -> range:
        """Return the rounds of a call of the largest ring; smaller ones may have fewer."""
        return range(
            call_start(call, self.rounds_per_call),
            min(call_start(call + 1, self.rounds_per_call), self.rounds("forward")),
        )

    def calls(self, direction: Direction) -> int:
        """Return the number of calls in which this rank computes or, for `backward`, sends dK,dV of the call before."""
        last = call_of_round(self.rounds("forward") - 1, self.rounds_per_call)
        return last + 1 + (self.rounds(direction) > self.rounds("forward"))

    def blocks(self, call: int) -> list[RingBlock]:
        """Return the blocks of a call that are not causal, which are computed in one kernel call.

        Empty blocks are left out: they would crash PyTorch's CPU kernel (SIGFPE).
        """
        found, of_call = [], self.rounds_of(call)  # once, because it reads all rings
        for number, ring in enumerate(self.rings):
            shard, turns = ring.shard, ring.rounds("forward")
            keys = [ring.kv_part(round_) for round_ in of_call if round_ < turns]
            for part, first in [(shard.part, ring.offset), *((mate.part, mate.rows.start) for mate in ring.mates)]:
                for block in blocks(shard.length, shard.degree, part, keys, shard.earlier):
                    found.append(RingBlock(number, slice(first + block.q_start, first + block.q_stop), block.keys))
        return found

    def causal_call(self, overlapped: bool = False) -> Call | None:
        """Return the kernel call of round 0, in which each shard attends to itself; None without tokens.

        `overlapped` says that transfers run at the same time.
        """
        return Call(self.bounds, self.bounds, True, overlapped) if self.tokens else None


def call_of(blocks: list[RingBlock], overlapped: bool = False) -> Call:
    """Return the kernel call of the blocks of a call, packed one after the other. `overlapped`: see `causal_call`."""
    queries = accumulate((block.rows.stop - block.rows.start for block in blocks), initial=0)
    keys = accumulate((sum(block.keys) for block in blocks), initial=0)
    return Call(tuple(queries), tuple(keys), False, overlapped)


def layout(micro: MicroBatch, rounds_per_call: int = 1) -> Layout:
    """Create the layout of a micro-batch with at least one shard. Shards may be empty.

    A call has at most `rounds_per_call` rounds, a power of two.
    """
    sizes = [shard_tokens(shard.length, shard.degree, shard.part) for shard in micro.shards]
    offsets = list(accumulate(sizes, initial=0))
    rings, rows, end = [], [], offsets[-1]
    for shard, offset, size in zip(micro.shards, offsets, sizes, strict=False):
        in_ring = shard.degree > 1 or shard.sliced
        rows.append(ShardRows(offset, offset + size, shard.whole, in_ring))
        if in_ring:
            # The rows of mates follow all own rows: the queries for which this rank computes a part.
            team = []
            for part in mates(shard.part, shard.team):
                begin, end = end, end + shard_tokens(shard.length, shard.degree, part)
                team.append(Mate(part, shard.ring[part], slice(begin, end)))
            rings.append(RingShard(shard, offset, size, tuple(team)))
    return Layout(offsets[-1], tuple(sorted(set(offsets))), tuple(rings), tuple(rows), rounds_per_call)


def idle(tokens: int) -> Layout:
    """Create the layout of an idle micro-batch: its tokens attend to each other, but belong to no shard and do not
    affect the loss."""
    return Layout(tokens, tuple(sorted({0, tokens})), (), ())
