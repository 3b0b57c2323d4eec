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

The expert counts of a sequence (tokens per expert, of mixture-of-experts models) travel as K,V do in a forward pass:
once per micro-batch, all layers together, after its last layer.
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
    """Queries q_start .. q_stop - 1 of a shard attend to keys 0 .. kv_stop - 1 of the same or another part of the ring.

    The keys of a part are its prefix, followed by its shard. A causal block has the keys of the shard alone.
    """

    q_start: int
    q_stop: int
    kv_stop: int
    causal: bool


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


def blocks(length: int, degree: int, q_part: int, kv_part: int, earlier: Sequence[int] = ()) -> list[Block]:
    """Return which queries of shard `q_part` attend to which keys of part `kv_part`, as offsets.

    `length` is that of the slice, `earlier` has those of the slices before it. No block is empty.
    """
    q_low, q_high = shard_spans(length, degree, q_part)
    kv_low, kv_high = shard_spans(length, degree, kv_part)
    queries, prefix = q_low.tokens + q_high.tokens, prefix_tokens(earlier, degree, kv_part)
    if kv_part == q_part:
        found = [Block(0, queries, queries, causal=True), Block(0, queries, prefix, causal=False)]
    elif kv_part < q_part:  # the low chunk of the keys precedes both chunks of the queries, the high one follows both
        found = [Block(0, queries, prefix + kv_low.tokens, causal=False)]
    else:  # both chunks of the keys lie between the two chunks of the queries
        keys = prefix + kv_low.tokens + kv_high.tokens
        found = [Block(0, q_low.tokens, prefix, causal=False), Block(q_low.tokens, queries, keys, causal=False)]
    return [one for one in found if one.q_start < one.q_stop and one.kv_stop > 0]


def kv_part(degree: int, part: int, round_: int) -> int:
    """Return the part whose K,V part `part` computes with in round `round_`."""
    return (part - round_) % degree


def rounds(degree: int, direction: Direction) -> int:
    """Return the number of rounds in which a part computes or sends: D, and in a backward pass D + 1 if D > 1."""
    return degree + 1 if direction == "backward" and degree > 1 else degree


def transfers(degree: int, part: int, round_: int, direction: Direction) -> tuple[Transfer, ...]:
    """Return what a part sends to part + 1 and receives from part - 1 during a round, in posting order."""
    posted = []
    if round_ < degree - 1:
        kind: Kind = "counts" if direction == "counts" else "kv"
        posted.append(Transfer(kind, kv_part(degree, part, round_), kv_part(degree, part, round_ + 1)))
    if direction == "backward" and degree > 1 and 1 <= round_ <= degree:
        posted.append(Transfer("dkv", kv_part(degree, part, round_ - 1), kv_part(degree, part, round_)))
    return tuple(posted)
