"""The StepPlan: which rank computes which part of which sequence, in which order, and in rings of which ranks.

A step is planned once and read three times: the engine runs the plan, the simulator times it, and the report draws it.

In a pipeline a long sequence may be cut into slices along its tokens, each in a separate micro-batch, so that a stage
can start on the first slice while the stage before it computes the next one (Seq1F1B, arXiv 2406.03488):

```
 sequence of 10 tokens in 3 slices    tokens 0 .. 4 | 5 .. 7 | 8 9       earlier slices are cheaper per token
```
A slice attends to itself and to the earlier slices of its sequence, whose K,V stay on their ranks until their backward
pass. So all slices of a sequence have the same ring, and backward passes run from the last slice to the first. A
sequence that is not cut is one slice.

Letters: S slices, P HDP ranks, K shards (the sum of all ring degrees), M micro-batches, G gangs, L micro-batches of the
rank that has the most. ppm is parts per million.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from engine.planner.plan.rows import hops, row_of_each
from engine.readers import parse_line
from engine.units import PPM, Bools, Ints


@dataclass(frozen=True)
class Shard:
    """One rank's part of one slice of a sequence, as a small view for people and for the engine."""

    sequence: int  # number in the step
    length: int  # tokens of the slice
    ring: tuple[int, ...]  # the ordered ranks that share the sequence
    part: int  # index of this shard in the ring
    earlier: tuple[int, ...] = ()  # tokens of each earlier slice of the sequence
    later: int = 0  # tokens of all later slices
    team: int = 1  # parts of the ring that share their queries (schedule.py)

    @property
    def degree(self) -> int:
        return len(self.ring)

    @property
    def sliced(self) -> bool:
        """Whether the sequence has more than one slice."""
        return bool(self.earlier) or self.later > 0

    @property
    def whole(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.earlier) + self.length + self.later


@dataclass(frozen=True)
class MicroBatch:
    """Shards that a rank runs forward and backward together; idle if it has none."""

    index: int  # counted over all ranks
    rank: int
    gang: int
    slot: int  # -1 outside lockstep mode
    shards: tuple[Shard, ...]
    offload: float = 0.0  # offload ratio: fraction of the saved activations that is moved to the host


class RankPlan(Protocol):
    """What a rank reads of the plan of a step: it has a StepPlan, or a cut of one (cut.py), and need not know which.

    All figures are those of the whole plan. The fields are as in StepPlan.
    """

    @property
    def mode(self) -> str: ...
    @property
    def stages(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def passes(self) -> Ints: ...
    @property
    def digest(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def unsplit_tokens(self) -> int: ...
    @property
    def max_degree(self) -> int: ...

    def overlaps(self, rank: int) -> bool:
        """Return whether a rank reduces gradients within its last backward pass. A cut knows its ranks only."""
        ...

    def micro_batch(self, index: int) -> MicroBatch:
        """Return micro-batch `index`, counted over all ranks. A cut has those of its ranks only."""
        ...

    def of_rank(self, rank: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a rank in the order in which it runs them."""
        ...

    def count(self, rank: int) -> int:
        """Return the number of micro-batches of a rank."""
        ...


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step as arrays in compressed rows (rows.py), so that a plan is one buffer to broadcast and to hash.

    ```
    rank r --micro_start--> micro-batches --shard_start--> shard_order --> shard k
    slice s --ring_start--> shards k = ring_start[s] + part --> ring_ranks[k], the rank that holds it
    ```
    A shard's number is its index in `ring_ranks`. The slices of a sequence follow each other.
    All arrays are int64. Units: lengths and capacity in tokens (inputs), offload in ppm.
    Modes: in "free" ranks wait for each other only in rings and at the end of the step, in "lockstep" also in every
    slot, and in "pipeline" each rank is a pipeline of stages, whose passes run in the order of `passes` (order.py).
    """

    planner: str
    mode: str
    stages: int  # 1 except in a pipeline
    ranks: int  # P
    capacity: int  # tokens that a rank holds in one micro-batch
    lengths: Ints  # [S] inputs of each slice
    before: Ints  # [S] inputs of the earlier slices of its sequence; 0 for a first slice
    team: Ints  # [S] parts of its ring that form a team (schedule.py); 1 without teams
    ring_start: Ints  # [S + 1]
    ring_ranks: Ints  # [K]
    micro_start: Ints  # [P + 1] rank r runs micro-batches micro_start[r] .. micro_start[r + 1] - 1, in that order
    shard_start: Ints  # [M + 1]
    shard_order: Ints  # [K] shard numbers, micro-batch by micro-batch
    gang: Ints  # [M] micro-batches that share rings run at the same time and have the same gang
    slot: Ints  # [M] place in the lockstep order; -1 in other modes
    offload: Ints  # [M] offload ratio, ppm
    overlap: Ints  # [P] 1 for ranks that reduce gradients within their last backward pass (modes.py), else 0
    # [2 stages L] in a pipeline, all passes of a rank with L micro-batches, in order (order.py); else empty
    passes: Ints

    @property
    def slices(self) -> int:
        """The number of slices S."""
        return len(self.lengths)

    @cached_property
    def tokens(self) -> int:
        """The tokens of all sequences."""
        return int(self.lengths.sum())

    @cached_property
    def unsplit_tokens(self) -> int:
        """The tokens of the sequences on one rank."""
        return int(self.lengths[self.degrees == 1].sum())

    @cached_property
    def max_degree(self) -> int:
        """The largest ring degree."""
        return int(self.degrees.max())

    @cached_property
    def sequences(self) -> int:
        """The number of sequences."""
        return int((self.before == 0).sum())

    @cached_property
    def sequence_lengths(self) -> Ints:
        """The inputs of each sequence, [sequences]."""
        if self.sequences == self.slices:
            return self.lengths
        return np.add.reduceat(self.lengths, np.flatnonzero(self.before == 0))

    @cached_property
    def slice_sequence(self) -> Ints:
        """The sequence of each slice, [S]."""
        return np.cumsum(self.before == 0) - 1

    @cached_property
    def sliced(self) -> Bools:
        """Whether each slice is one of several of its sequence, [S]."""
        return self.lengths != self.sequence_lengths[self.slice_sequence]

    @cached_property
    def continued(self) -> Bools:
        """Whether each slice has later ones, which attend to its K,V, [S]."""
        return np.append(self.before[1:] > 0, False)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches M, idle ones included."""
        return len(self.gang)

    @cached_property
    def gangs(self) -> int:
        """The number of gangs G."""
        return int(self.gang.max()) + 1

    @cached_property
    def degrees(self) -> Ints:
        """The ring degree of each slice, [S]."""
        return np.diff(self.ring_start)

    @cached_property
    def shard_slice(self) -> Ints:
        """The slice of each shard, [K]."""
        return row_of_each(self.ring_start)

    @cached_property
    def shard_micro(self) -> Ints:
        """The micro-batch that holds each shard, [K]."""
        micro = np.empty_like(self.shard_order)
        micro[self.shard_order] = row_of_each(self.shard_start)
        return micro

    @cached_property
    def next_shard(self) -> Ints:
        """The shard to which the K,V of each shard go next, [K]: that of the next team in its ring.

        A shard alone is followed by itself.
        """
        return self.hops(self.team)

    def hops(self, parts: Ints) -> Ints:
        """Return for each shard the one that is parts[s] places further in the ring of its slice s, [K]."""
        return hops(self.ring_start, parts)

    def mates(self, turn: int) -> Ints:
        """Return for each shard the one `turn` places further in its team, [K]; itself if the team is not larger."""
        team = self.team[self.shard_slice]
        place = (np.arange(len(self.ring_ranks)) - self.ring_start[self.shard_slice]) % team
        return np.arange(len(self.ring_ranks)) - place + (place + turn * (turn < team)) % team

    @cached_property
    def micro_rank(self) -> Ints:
        """The rank that runs each micro-batch, [M]."""
        return row_of_each(self.micro_start)

    def ring(self, slice_: int) -> tuple[int, ...]:
        """Return the ordered ranks that share a slice."""
        return tuple(self.ring_ranks[self.ring_start[slice_] : self.ring_start[slice_ + 1]].tolist())

    def micro_batch(self, index: int) -> MicroBatch:
        """Return micro-batch `index`, counted over all ranks, as an object."""
        shards = []
        for shard in self.shard_order[self.shard_start[index] : self.shard_start[index + 1]].tolist():
            at = int(self.shard_slice[shard])
            sequence, part = int(self.slice_sequence[at]), shard - int(self.ring_start[at])
            first, length, before = at, int(self.lengths[at]), int(self.before[at])
            while self.before[first] > 0:
                first -= 1
            earlier = tuple(self.lengths[first:at].tolist())
            later = int(self.sequence_lengths[sequence]) - before - length
            shards.append(Shard(sequence, length, self.ring(at), part, earlier, later, int(self.team[at])))
        rank, gang, slot = int(self.micro_rank[index]), int(self.gang[index]), int(self.slot[index])
        return MicroBatch(index, rank, gang, slot, tuple(shards), int(self.offload[index]) / PPM)

    def of_rank(self, rank: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a rank in the order in which it runs them."""
        for index in range(int(self.micro_start[rank]), int(self.micro_start[rank + 1])):
            yield self.micro_batch(index)

    def count(self, rank: int) -> int:
        """Return the number of micro-batches of a rank."""
        return int(self.micro_start[rank + 1] - self.micro_start[rank])

    def overlaps(self, rank: int) -> bool:
        """Return whether a rank reduces gradients within its last backward pass."""
        return bool(self.overlap[rank])

    def arrays(self) -> dict[str, Ints]:
        """Return the arrays by name, in the order in which `to_bytes` writes them."""
        return {name: getattr(self, name) for name in _ARRAYS}

    def to_bytes(self) -> bytes:
        """Serialise the plan: a JSON head of one line, then the arrays in little-endian order."""
        arrays = self.arrays()
        head = {name: getattr(self, name) for name in _SCALARS} | {"sizes": {n: len(a) for n, a in arrays.items()}}
        body = b"".join(np.ascontiguousarray(array, dtype="<i8").tobytes() for array in arrays.values())
        return json.dumps(head, sort_keys=True).encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, buffer: bytes) -> StepPlan:
        """Read a plan from the bytes that `to_bytes` wrote."""
        end = buffer.index(b"\n")
        values: dict[str, Any] = parse_line(buffer[:end])
        # The copy is aligned and writable, as @njit functions expect.
        body = np.frombuffer(buffer, dtype="<i8", offset=end + 1).copy()
        sizes = values.pop("sizes")
        names = [name for name in _ARRAYS if name in sizes]
        ends = list(accumulate(sizes[name] for name in names))
        values |= dict(zip(names, np.split(body, ends[:-1]), strict=True))
        values.setdefault("overlap", np.zeros(values["ranks"], dtype=np.int64))  # earlier versions had no overlap
        return cls(**values)

    @cached_property
    def digest(self) -> str:
        """Hash of the plan's bytes; equal on every rank and after every restart."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()


_SCALARS = ("planner", "mode", "stages", "ranks", "capacity")
_ARRAYS = tuple(f.name for f in fields(StepPlan) if f.name not in _SCALARS)
