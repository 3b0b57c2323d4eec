"""The schedule of a ring: how a sequence is split, and what each rank sends and computes in each round.

The schedule is data, not code: `verify` checks it, the simulator times it, the data plane slices by it, and attention
executes it.

A sequence on a ring of degree D is split into 2D chunks; part i holds chunks i and 2D-1-i, so every part has about the
same fraction of the causal triangle (ByteScale, dist-attention). D = 3, one row per query chunk; a letter is the part
that holds the chunk, of queries on the left and of keys in the triangle:

```
 chunk   0 1 2 3 4 5
   0  A  A
   1  B  A B
   2  C  A B C
   3  C  A B C C
   4  B  A B C C B
   5  A  A B C C B A
```

The chunks of a slice are those of its own tokens. Each part also has its shards of the earlier slices of the sequence,
its prefix: the K,V that it sends around the ring are those of its prefix and of its shard. All queries of the slice
attend to all keys of all prefixes.

In round t, part i computes with the K,V of part (i - t) mod D and sends them on to part i + 1 at the same time. In the
backward pass the dK,dV of a part follow its K,V one round later, and return to their owner in round D.

Teams. With many ranks a round has little work, and the K,V of the whole sequence pass through every rank. So the parts
of a ring may form teams of c consecutive parts. The members of a team first send each other their queries. Then each
one computes with the queries of the whole team, but only with the K,V of the parts at its own place in their teams:
these travel in a ring of D / c ranks. At the end each member gets the partial results of its queries from the others.
D = 6 in teams of 2, K,V travel along the columns:

```
 team 0   part 0   part 1       K,V of parts 0, 2, 4 meet all queries on parts 0, 2, 4
 team 1   part 2   part 3       K,V of parts 1, 3, 5 meet all queries on parts 1, 3, 5
 team 2   part 4   part 5
```
K,V make D / c - 1 hops instead of D - 1, and as many rounds less, for (c - 1) messages of queries and of
results (StarTrail, arXiv 2407.00611). With grouped-query attention queries are larger than K,V, so teams are small.

Calls. In a pipeline, where rounds are short, one call of the attention kernel computes several rounds, so that fewer
kernels start, and fewer results are merged. The first call has one round, because the K,V of other parts have not
arrived. Each later one has twice as many as the call before, up to four. Its K,V arrive during the call before:

```
 rounds of the calls   0 | 1 2 | 3 4 5 6 | 7 8 9 10 | ...
```
The dK,dV of a call's rounds make their hops during the next call.

The expert counts of a sequence (tokens per expert, of mixture-of-experts models) travel as K,V do in a forward pass:
once per micro-batch, all layers together, after its last layer. Teams do not matter for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from numba.extending import register_jitable

Direction = Literal["forward", "backward", "counts"]
Kind = Literal["kv", "dkv", "counts"]  # of a buffer


class Span(NamedTuple):
    """Tokens start .. stop - 1 of a sequence."""

    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return self.stop - self.start


class Block(NamedTuple):
    """Queries q_start .. q_stop - 1 of a shard attend to the first keys[i] keys of each part i of a call's parts.

    The keys of a part are its prefix, followed by its shard.
    """

    q_start: int
    q_stop: int
    keys: tuple[int, ...]


class Transfer(NamedTuple):
    """What a part exchanges in a round: sends a buffer to the next part of the ring, receives one from the previous."""

    kind: Kind
    send: int  # the part whose K,V, dK,dV or counts are sent
    receive: int  # the part whose buffer is received


@register_jitable
def chunk_start(size: int, longer: int, chunk: int) -> int:
    """Return the first token of a chunk, where (size, longer) = divmod(length, 2D).

    Chunks have `size` tokens, the first `longer` ones have one more. So the largest shard has ceil(length / D) tokens,
    and a ring of degree ceil(length / C) fits capacity C.
    """
    return chunk * size + min(chunk, longer)


def shard_spans(length: int, degree: int, part: int) -> tuple[Span, Span]:
    """Return the two spans (chunks `part` and 2D-1-part) of a shard, in the order in which its rank stores them."""
    size, longer = divmod(length, 2 * degree)
    low, high = (
        Span(chunk_start(size, longer, chunk), chunk_start(size, longer, chunk + 1))
        for chunk in (part, 2 * degree - 1 - part)
    )
    return low, high


def shard_tokens(length: int, degree: int, part: int) -> int:
    """Return the number of tokens of a shard."""
    low, high = shard_spans(length, degree, part)
    return low.tokens + high.tokens


def prefix_tokens(earlier: Sequence[int], degree: int, part: int) -> int:
    """Return the tokens of a part's prefix, for earlier slices of so many tokens."""
    return sum(shard_tokens(length, degree, part) for length in earlier)


def blocks(length: int, degree: int, q_part: int, kv_parts: Sequence[int], earlier: Sequence[int] = ()) -> list[Block]:
    """Return which queries of shard `q_part` attend to which keys of the parts `kv_parts`, as offsets.

    `length` is that of the slice, `earlier` has those of the slices before it. No block is empty. The causal block of a
    shard with itself is not included.
    """
    q_low, q_high = shard_spans(length, degree, q_part)
    by_low, by_high = list[int](), list[int]()  # keys of each part that the two chunks of queries attend to
    for part in kv_parts:
        low, high = shard_spans(length, degree, part)
        prefix = prefix_tokens(earlier, degree, part)
        # If part < q_part, the low chunk of the keys precedes both chunks of the queries, and the high one follows
        # both. If part > q_part, both chunks of the keys lie between the two chunks of the queries.
        by_low.append(prefix + (low.tokens if part < q_part else 0))
        by_high.append(prefix + (low.tokens if part != q_part else 0) + (high.tokens if part > q_part else 0))
    queries = q_low.tokens + q_high.tokens
    if by_low == by_high:
        found = [Block(0, queries, tuple(by_low))]
    else:
        found = [Block(0, q_low.tokens, tuple(by_low)), Block(q_low.tokens, queries, tuple(by_high))]
    return [one for one in found if one.q_start < one.q_stop and any(one.keys)]


def kv_part(degree: int, part: int, round_: int, team: int = 1) -> int:
    """Return the part whose K,V part `part` computes with in round `round_`."""
    return (part - round_ * team) % degree


def mates(part: int, team: int) -> list[int]:
    """Return the other parts of a part's team, in ascending order."""
    first = part - part % team
    return [mate for mate in range(first, first + team) if mate != part]


@register_jitable
def call_of_round(round_: int, most: int) -> int:
    """Return the number of the call that computes a round, if a call has at most `most` rounds, a power of two.

    It must depend on nothing else: two ranks of a ring, which may have other rings too, pair their hops by it.
    """
    call, size = 0, 1
    while size < most and round_ >= size:
        call, round_, size = call + 1, round_ - size, 2 * size
    return call + round_ // size


@register_jitable
def call_start(call: int, most: int) -> int:
    """Return the first round of a call; see `call_of_round`."""
    round_, size = 0, 1
    while size < most and call > 0:
        call, round_, size = call - 1, round_ + size, 2 * size
    return round_ + call * size


def rounds(degree: int, direction: Direction, team: int = 1) -> int:
    """Return the number of rounds in which a part computes or sends: D / c, and in a backward pass one more if D / c is
    above 1."""
    turns = degree if direction == "counts" else degree // team
    return turns + 1 if direction == "backward" and turns > 1 else turns


def transfers(degree: int, part: int, round_: int, direction: Direction, team: int = 1) -> tuple[Transfer, ...]:
    """Return what a part sends to part + c and receives from part - c during a round, in posting order.

    c is 1 for expert counts. The messages between the members of a team are not among them.
    """
    if direction == "counts":
        team = 1
    posted, turns = [], degree // team
    if round_ < turns - 1:
        kind: Kind = "counts" if direction == "counts" else "kv"
        posted.append(Transfer(kind, kv_part(degree, part, round_, team), kv_part(degree, part, round_ + 1, team)))
    if direction == "backward" and turns > 1 and 1 <= round_ <= turns:
        posted.append(Transfer("dkv", kv_part(degree, part, round_ - 1, team), kv_part(degree, part, round_, team)))
    return tuple(posted)
