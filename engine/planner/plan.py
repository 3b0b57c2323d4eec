"""The StepPlan: who computes which piece of which sequence, in which order, in rings of which ranks.

Planned once and read three times: the engine runs it on real ranks, the simulator on imagined ones, and the report
draws it.
Letters: S sequences, P ranks, K shards (the sum of all ring degrees), M micro-batches. ppm is parts per million.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.planner.rows import row_of, spread

Ints = NDArray[np.int64]
PPM = 1_000_000


@dataclass(frozen=True)
class Shard:
    """One rank's part of one sequence, as a small view for people and for the engine.

    `ring` are the ordered ranks that share the sequence; this shard is number `part` of them.
    """

    sequence: int
    length: int
    ring: tuple[int, ...]
    part: int

    @property
    def degree(self) -> int:
        """Return the number of ranks in the ring."""
        return len(self.ring)


@dataclass(frozen=True)
class MicroBatch:
    """What a rank runs forward and backward together. `index` counts over all ranks; without shards it is idle.

    `offload` is the share, from 0 to 1, of the middle layers' saved activations that goes to the host.
    """

    index: int
    rank: int
    gang: int
    slot: int
    shards: tuple[Shard, ...]
    offload: float = 0.0


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step as arrays, in compressed rows: one buffer to broadcast and to hash.

    ```
    rank r --micro_start--> micro-batches --shard_start--> shard_order --> shard k
    sequence s --ring_start--> shards k = ring_start[s] + part --> ring_ranks[k], the rank that holds it
    ```
    A shard's number is its place in `ring_ranks`, so a ring needs no table of its own.
    All arrays are int64. Units: lengths and capacity in tokens (inputs), offload in ppm.
    Modes: in "free" ranks meet in rings and at the end of the step, in "lockstep" they meet in every slot, and in
    "pipeline" each rank is a line of stages that run 1F1B (order.py).
    """

    planner: str
    mode: str
    stages: int  # of a pipeline, else 1
    ranks: int  # P
    capacity: int  # tokens that a rank holds in one micro-batch
    lengths: Ints  # [S] inputs of each sequence
    ring_start: Ints  # [S + 1]
    ring_ranks: Ints  # [K]
    micro_start: Ints  # [P + 1] rank r runs micro-batches micro_start[r] .. micro_start[r + 1], in that order
    shard_start: Ints  # [M + 1]
    shard_order: Ints  # [K] shard numbers, micro-batch by micro-batch
    gang: Ints  # [M] micro-batches that share rings run at the same time and have the same gang
    slot: Ints  # [M] place in the lockstep order; -1 in other modes
    offload: Ints  # [M] ppm of the saved activations that go to the host; the last two layers' stay

    @property
    def sequences(self) -> int:
        """Return S."""
        return len(self.lengths)

    @property
    def micro_batches(self) -> int:
        """Return M, idle ones included."""
        return len(self.gang)

    @cached_property
    def degrees(self) -> Ints:
        """Return the ring degree of each sequence, [S]."""
        return np.diff(self.ring_start)

    @cached_property
    def shard_sequence(self) -> Ints:
        """Return the sequence of each shard, [K]."""
        return spread(self.ring_start)

    @cached_property
    def shard_micro(self) -> Ints:
        """Return the micro-batch that holds each shard, [K]."""
        return row_of(self.shard_start, self.shard_order)

    @cached_property
    def micro_rank(self) -> Ints:
        """Return the rank that runs each micro-batch, [M]."""
        return spread(self.micro_start)

    def ring(self, sequence: int) -> tuple[int, ...]:
        """Return the ordered ranks that share a sequence."""
        return tuple(self.ring_ranks[self.ring_start[sequence] : self.ring_start[sequence + 1]].tolist())

    def micro_batch(self, index: int) -> MicroBatch:
        """Return the view of one micro-batch."""
        shards = []
        for shard in self.shard_order[self.shard_start[index] : self.shard_start[index + 1]].tolist():
            sequence = int(self.shard_sequence[shard])
            part = shard - int(self.ring_start[sequence])
            shards.append(Shard(sequence, int(self.lengths[sequence]), self.ring(sequence), part))
        rank, gang, slot = int(self.micro_rank[index]), int(self.gang[index]), int(self.slot[index])
        return MicroBatch(index, rank, gang, slot, tuple(shards), int(self.offload[index]) / PPM)

    def of_rank(self, rank: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a rank in the order in which it runs them."""
        for index in range(int(self.micro_start[rank]), int(self.micro_start[rank + 1])):
            yield self.micro_batch(index)

    def arrays(self) -> dict[str, Ints]:
        """Return the plan's arrays by name, in the order in which they are written."""
        return {name: getattr(self, name) for name in _ARRAYS}

    def to_bytes(self) -> bytes:
        """Return the plan as one buffer: a JSON head of one line, then the arrays, little-endian."""
        arrays = self.arrays()
        head = {name: getattr(self, name) for name in _SCALARS} | {"sizes": {n: len(a) for n, a in arrays.items()}}
        body = b"".join(np.ascontiguousarray(array, dtype="<i8").tobytes() for array in arrays.values())
        return json.dumps(head, sort_keys=True).encode() + b"\n" + body

    @classmethod
    def from_bytes(cls, buffer: bytes) -> StepPlan:
        """Return the plan that `to_bytes` wrote."""
        end = buffer.index(b"\n")
        values: dict[str, Any] = json.loads(buffer[:end])
        body = np.frombuffer(buffer, dtype="<i8", offset=end + 1).copy()  # aligned and writable, as kernels expect
        sizes = values.pop("sizes")
        ends = list(accumulate(sizes[name] for name in _ARRAYS))
        values |= dict(zip(_ARRAYS, np.split(body, ends[:-1]), strict=True))
        return cls(**values)

    @cached_property
    def digest(self) -> str:
        """Return the hash of the plan's bytes; equal on every rank and after every restart."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()


_SCALARS = ("planner", "mode", "stages", "ranks", "capacity")
_ARRAYS = tuple(f.name for f in fields(StepPlan) if f.name not in _SCALARS)
