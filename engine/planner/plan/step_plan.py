"""The StepPlan: which rank computes which part of which sequence, in which order, and in rings of which ranks.

A step is planned once and read three times: the engine runs the plan, the simulator times it, and the report draws it.
Letters: S sequences, P HDP ranks, K shards (the sum of all ring degrees), M micro-batches, G gangs. ppm is parts per
million.
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

from engine.planner.plan.rows import row_of_each
from engine.units import PPM, Ints


@dataclass(frozen=True)
class Shard:
    """One rank's part of one sequence, as a small view for people and for the engine."""

    sequence: int
    length: int  # tokens of the whole sequence
    ring: tuple[int, ...]  # the ordered ranks that share the sequence
    part: int  # index of this shard in the ring

    @property
    def degree(self) -> int:
        return len(self.ring)


@dataclass(frozen=True)
class MicroBatch:
    """Shards that a rank runs forward and backward together; idle if it has none."""

    index: int  # counted over all ranks
    rank: int
    gang: int
    slot: int  # -1 outside lockstep mode
    shards: tuple[Shard, ...]
    offload: float = 0.0  # offload ratio: fraction of the saved activations that is moved to the host


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step as arrays in compressed rows (rows.py), so that a plan is one buffer to broadcast and to hash.

    ```
    rank r --micro_start--> micro-batches --shard_start--> shard_order --> shard k
    sequence s --ring_start--> shards k = ring_start[s] + part --> ring_ranks[k], the rank that holds it
    ```
    A shard's number is its index in `ring_ranks`.
    All arrays are int64. Units: lengths and capacity in tokens (inputs), offload in ppm.
    Modes: in "free" ranks wait for each other only in rings and at the end of the step, in "lockstep" also in every
    slot, and in "pipeline" each rank is a pipeline of stages that runs 1F1B (order.py).
    """

    planner: str
    mode: str
    stages: int  # 1 except in a pipeline
    ranks: int  # P
    capacity: int  # tokens that a rank holds in one micro-batch
    lengths: Ints  # [S] inputs of each sequence
    ring_start: Ints  # [S + 1]
    ring_ranks: Ints  # [K]
    micro_start: Ints  # [P + 1] rank r runs micro-batches micro_start[r] .. micro_start[r + 1] - 1, in that order
    shard_start: Ints  # [M + 1]
    shard_order: Ints  # [K] shard numbers, micro-batch by micro-batch
    gang: Ints  # [M] micro-batches that share rings run at the same time and have the same gang
    slot: Ints  # [M] place in the lockstep order; -1 in other modes
    offload: Ints  # [M] offload ratio, ppm

    @property
    def sequences(self) -> int:
        return len(self.lengths)

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
        """The ring degree of each sequence, [S]."""
        return np.diff(self.ring_start)

    @cached_property
    def shard_sequence(self) -> Ints:
        """The sequence of each shard, [K]."""
        return row_of_each(self.ring_start)

    @cached_property
    def shard_micro(self) -> Ints:
        """The micro-batch that holds each shard, [K]."""
        micro = np.empty_like(self.shard_order)
        micro[self.shard_order] = row_of_each(self.shard_start)
        return micro

    @cached_property
    def next_shard(self) -> Ints:
        """The next shard in each shard's ring, [K]; a shard alone in its ring is followed by itself."""
        following = np.arange(1, len(self.ring_ranks) + 1)
        following[self.ring_start[1:] - 1] = self.ring_start[:-1]
        return following

    @cached_property
    def micro_rank(self) -> Ints:
        """The rank that runs each micro-batch, [M]."""
        return row_of_each(self.micro_start)

    def ring(self, sequence: int) -> tuple[int, ...]:
        """Return the ordered ranks that share a sequence."""
        return tuple(self.ring_ranks[self.ring_start[sequence] : self.ring_start[sequence + 1]].tolist())

    def micro_batch(self, index: int) -> MicroBatch:
        """Return micro-batch `index`, counted over all ranks, as an object."""
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
        values: dict[str, Any] = json.loads(buffer[:end])
        # The copy is aligned and writable, as @njit functions expect.
        body = np.frombuffer(buffer, dtype="<i8", offset=end + 1).copy()
        sizes = values.pop("sizes")
        ends = list(accumulate(sizes[name] for name in _ARRAYS))
        values |= dict(zip(_ARRAYS, np.split(body, ends[:-1]), strict=True))
        return cls(**values)

    @cached_property
    def digest(self) -> str:
        """Hash of the plan's bytes; equal on every rank and after every restart."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()


_SCALARS = ("planner", "mode", "stages", "ranks", "capacity")
_ARRAYS = tuple(f.name for f in fields(StepPlan) if f.name not in _SCALARS)
