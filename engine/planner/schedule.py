"""What a ring does: how a sequence is cut, and for each round who sends what to whom and which blocks meet.

Data, not code: `verify` checks it, the simulator times it, the data plane slices by it, attention executes it.

A sequence on a ring of degree D is cut into 2D chunks; part i holds chunks i and 2D-1-i, so that every part has about
the same share of the causal triangle (ByteScale, dist-attention). D = 3, one row a query chunk, letters are parts:

```
 chunk   0 1 2 3 4 5
   0  A  A
   1  B  A B
   2  C  A B C
   3  C  A B C C
   4  B  A B C C B
   5  A  A B C C B A
```

In round t, part i works with the K,V of part (i - t) mod D, and passes them on to part i + 1 meanwhile. In the backward
pass the dK,dV of a part follow its K,V one round behind, and go home in round D.

Counts that a whole sequence needs (how many tokens its experts got) travel as K,V do in a forward pass: once for each
micro-batch, all layers together, after its last layer.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from numba.extending import register_jitable

Direction = Literal["forward", "backward", "counts"]
Kind = Literal["kv", "dkv", "counts"]  # of a message


class Span(NamedTuple):
    """Tokens start..stop of a sequence."""

    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return self.stop - self.start


class Block(NamedTuple):
    """Queries q_start..q_stop of a shard meet keys 0..kv_stop of another (or the same) shard of the sequence."""

    q_start: int
    q_stop: int
    kv_stop: int
    causal: bool

    @property
    def empty(self) -> bool:
        """Return whether one side has no token; such a block must never reach a kernel."""
        return self.q_start == self.q_stop or self.kv_stop == 0


class Transfer(NamedTuple):
    """In a round a part sends the buffer of part `send` to its next, and receives `receive` from its previous."""

    kind: Kind
    send: int
    receive: int


@register_jitable
def chunk_start(size: int, longer: int, chunk: int) -> int:
    """Return where a chunk begins, in tokens: chunks have `size`, the first `longer` one more (length divmod 2D).

    So the largest shard has ceil(length / degree) tokens: a degree of ceil(length / C) always fits capacity C.
    """
    return chunk * size + min(chunk, longer)


@register_jitable
def part_tokens(size: int, longer: int, degree: int, part: int) -> int:
    """Return the tokens of chunks `part` and 2D-1-part."""
    low, high = part, 2 * degree - 1 - part
    starts = chunk_start(size, longer, low) + chunk_start(size, longer, high)
    return chunk_start(size, longer, low + 1) + chunk_start(size, longer, high + 1) - starts


def shard_spans(length: int, degree: int, part: int) -> tuple[Span, Span]:
    """Return the two spans (chunks `part` and 2D-1-part) of a shard, in the order in which the rank holds them."""
    size, longer = divmod(length, 2 * degree)

    def chunk(c: int) -> Span:
        return Span(chunk_start(size, longer, c), chunk_start(size, longer, c + 1))

    return chunk(part), chunk(2 * degree - 1 - part)


def shard_tokens(length: int, degree: int, part: int) -> int:
    """Return the number of tokens of a shard."""
    size, longer = divmod(length, 2 * degree)
    return part_tokens(size, longer, degree, part)


def block(length: int, degree: int, q_part: int, kv_part: int) -> Block:
    """Return which queries of `q_part` meet which keys of `kv_part`, as offsets into their shards."""
    q_low, q_high = shard_spans(length, degree, q_part)
    kv_low, kv_high = shard_spans(length, degree, kv_part)
    queries = q_low.tokens + q_high.tokens
    if kv_part == q_part:
        return Block(0, queries, queries, causal=True)
    if kv_part < q_part:  # its low chunk precedes both of ours, its high chunk follows both
        return Block(0, queries, kv_low.tokens, causal=False)
    return Block(
        q_low.tokens, queries, kv_low.tokens + kv_high.tokens, causal=False
    )  # both precede our high chunk only


def kv_part(degree: int, part: int, round_: int) -> int:
    """Return whose K,V a part works with in a round."""
    return (part - round_) % degree


def rounds(degree: int, direction: Direction) -> int:
    """Return the number of rounds in which a part computes or transfers; a ring of one transfers nothing."""
    return degree + 1 if direction == "backward" and degree > 1 else degree


def transfers(degree: int, part: int, round_: int, direction: Direction) -> tuple[Transfer, ...]:
    """Return what a part sends to part + 1 and receives from part - 1 during this round, in posting order."""
    posted = []
    if round_ < degree - 1:
        kind: Kind = "counts" if direction == "counts" else "kv"
        posted.append(Transfer(kind, kv_part(degree, part, round_), kv_part(degree, part, round_ + 1)))
    if direction == "backward" and degree > 1 and 1 <= round_ <= degree:
        posted.append(Transfer("dkv", kv_part(degree, part, round_ - 1), kv_part(degree, part, round_)))
    return tuple(posted)
