"""Cuts: the part of a plan that some ranks need, for a planner that plans for all hosts and sends each its own.

```
 plan     ranks 0 .. P - 1      micro-batches 0 .. M - 1      all slices, in the order of their sequences
 cut      ranks of a host       theirs, with their numbers    those of their shards, and all others of these sequences
```
A cut has micro-batches with the numbers that they have in the plan, and rings of the plan's ranks, but its sequences
are numbered from 0, in the order of the plan. It also has the figures of the whole plan that every rank needs, such as
the digest. Values of sequences that only other packages know, the columns of a table, travel with their sequences.

Bytes. Integers of an array are stored as differences from the smallest one, in 0, 1, 2, 4 or 8 bytes each, with starts
of rows as sizes of rows. So most arrays have one or two bytes per integer, and constant ones have none.

Letters: as in step_plan.py, and H hosts, C columns of a table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.compiled import njit
from engine.planner.plan.rows import row_of_each
from engine.planner.plan.step_plan import MicroBatch, StepPlan
from engine.readers import parse_line
from engine.units import Ints

Buffer = NDArray[np.uint8]

_HEAD = 13  # bytes before an array: the width of its integers, their number, the smallest one
# Arrays in the order in which they are written, before the columns of a table; starts of rows as sizes of rows.
_PART = ("ring_start", "micro_start", "shard_start", "lengths", "before", "team", "ring_ranks", "shard_order")
_ARRAYS = ("ranks_here", "first_micro", *_PART, "gang", "slot", "offload", "overlap", "passes")
_FIGURES = ("digest", "tokens", "unsplit_tokens", "max_degree")


@dataclass(frozen=True, eq=False)
class Cut:
    """The part of a plan that some of its ranks need. Ranks read it as a RankPlan.

    In `part`, rank i is `ranks_here[i]`, its first micro-batch has the number `first_micro[i]` in the plan, and shards
    of other ranks are in no micro-batch.
    """

    part: StepPlan
    ranks_here: Ints  # [n] ascending
    first_micro: Ints  # [n]
    digest: str  # as the next ones, of the whole plan
    tokens: int
    unsplit_tokens: int
    max_degree: int

    @property
    def mode(self) -> str:
        return self.part.mode

    @property
    def stages(self) -> int:
        return self.part.stages

    @property
    def ranks(self) -> int:
        return self.part.ranks

    @property
    def passes(self) -> Ints:
        return self.part.passes

    def micro_batch(self, index: int) -> MicroBatch:
        """Return a micro-batch of these ranks, by its number in the plan. Raises KeyError for those of others."""
        here = int(np.searchsorted(self.first_micro, index, side="right")) - 1
        at = index - int(self.first_micro[here])
        if here < 0 or at >= self.part.count(here):
            raise KeyError(f"micro-batch {index} is on none of these ranks: {self.ranks_here.tolist()}")
        micro = self.part.micro_batch(int(self.part.micro_start[here]) + at)
        return replace(micro, index=index, rank=int(self.ranks_here[here]))

    def of_rank(self, rank: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a rank in the order in which it runs them. Raises KeyError for other ranks."""
        first = int(self.first_micro[self._here(rank)])
        return (self.micro_batch(index) for index in range(first, first + self.count(rank)))

    def count(self, rank: int) -> int:
        """Return the number of micro-batches of a rank. Raises KeyError for other ranks."""
        return self.part.count(self._here(rank))

    def overlaps(self, rank: int) -> bool:
        """Return whether a rank reduces gradients within its last backward pass. Raises KeyError for other ranks."""
        return self.part.overlaps(self._here(rank))

    def _here(self, rank: int) -> int:
        here = int(np.searchsorted(self.ranks_here, rank))
        if here == len(self.ranks_here) or self.ranks_here[here] != rank:
            raise KeyError(f"rank {rank} is none of these: {self.ranks_here.tolist()}")
        return here


def to_bytes(plan: StepPlan, columns: Ints) -> bytes:
    """Serialise a whole plan, with a table of its sequences: `columns` [C, sequences]."""
    found, none = plan.arrays(), np.empty(0, dtype=np.int64)
    found |= {name: np.diff(found[name]) for name in ("ring_start", "micro_start", "shard_start")}
    found |= {"ranks_here": none, "first_micro": none}  # without ranks it is a whole plan
    arrays = [*(found[name] for name in _ARRAYS), *columns]
    return _head(plan) + b"".join(_narrow(np.ascontiguousarray(array)).tobytes() for array in arrays)


def cuts(plan: StepPlan, hosts: Sequence[Sequence[int]], columns: Ints) -> list[bytes]:
    """Serialise the cut of each host, with the rows of its sequences: of a table, `columns` [C, sequences].

    `hosts` are the ranks of each host. All hosts are cut at once, as arrays in which the items of a host follow those
    of the host before it.
    """
    ranks = np.array([rank for of_host in hosts for rank in sorted(of_host)], dtype=np.int64)
    of_ranks = _starts(np.array([len(of_host) for of_host in hosts]))
    micros, counts = _items(plan.micro_start, ranks)
    of_micros = _starts(counts)[of_ranks]
    places, sizes = _items(plan.shard_start, micros)
    of_shards = _starts(sizes)[of_micros]

    # Each sequence once on each host that has a shard of it, with all of its slices and their rings.
    shards, host = plan.shard_order[places], row_of_each(of_shards)
    sequence_of = plan.slice_sequence[plan.shard_slice[shards]]
    pairs, pair = np.unique(host * plan.sequences + sequence_of, return_inverse=True)
    host_of_pair, sequences = np.divmod(pairs, plan.sequences)
    of_sequences = np.searchsorted(host_of_pair, np.arange(len(hosts) + 1))
    sequence_start = np.append(np.flatnonzero(plan.before == 0), plan.slices)
    slices, number_of_slices = _items(sequence_start, sequences)
    first_slice = _starts(number_of_slices)
    of_slices = first_slice[of_sequences]
    members, degrees = _items(plan.ring_start, slices)
    of_members = _starts(degrees)[of_slices]

    # The shards of a sequence follow each other in the plan, and so they do in the cut.
    first_member = _starts(degrees)[first_slice[:-1]]
    inside = shards - plan.ring_start[sequence_start[sequence_of]]
    shard_order = first_member[pair] + inside - of_members[host]

    everywhere = np.zeros(len(hosts) + 1, dtype=np.int64)
    found = {  # arrays, and where the items of each host begin
        "ranks_here": (ranks, of_ranks),
        "first_micro": (plan.micro_start[ranks], of_ranks),
        "ring_start": (degrees, of_slices),
        "micro_start": (counts, of_ranks),
        "shard_start": (sizes, of_micros),
        "ring_ranks": (plan.ring_ranks[members], of_members),
        "shard_order": (shard_order, of_shards),
        "overlap": (plan.overlap[ranks], of_ranks),
        "passes": (plan.passes, everywhere),
    }
    found |= {name: (getattr(plan, name)[slices], of_slices) for name in ("lengths", "before", "team")}
    found |= {name: (getattr(plan, name)[micros], of_micros) for name in ("gang", "slot", "offload")}
    arrays = [*(found[name] for name in _ARRAYS), *((column[sequences], of_sequences) for column in columns)]
    first = _starts(np.array([len(array) for array, _ in arrays]))[:-1, None]
    bounds = first + np.stack([of_hosts for _, of_hosts in arrays])
    begin, end = bounds[:, :-1], bounds[:, 1:].copy()
    end[_ARRAYS.index("passes")] += len(plan.passes)  # all hosts have the same
    buffer, ends = _joined(np.concatenate([array for array, _ in arrays]), begin.T.copy(), end.T.copy())
    head = _head(plan)
    return [head + one.tobytes() for one in np.split(buffer, ends[:-1])]


def from_bytes(buffer: bytes) -> tuple[StepPlan | Cut, Ints]:
    """Read a plan or a cut, and the columns of its table, [C, sequences]."""
    end = buffer.index(b"\n") + 1
    head: dict[str, Any] = parse_line(buffer[: end - 1])
    figures = {name: head.pop(name) for name in _FIGURES}
    arrays = list[Ints]()
    while end < len(buffer):
        array, end = _wide(buffer, end)
        arrays.append(array)
    found, columns = dict(zip(_ARRAYS, arrays, strict=False)), arrays[len(_ARRAYS) :]
    ranks, first_micro = found.pop("ranks_here"), found.pop("first_micro")
    head |= found | {name: _starts(found[name]) for name in ("ring_start", "micro_start", "shard_start")}
    plan = StepPlan(**head)
    table = np.stack(columns) if columns else np.empty((0, plan.sequences), dtype=np.int64)
    return Cut(plan, ranks, first_micro, **figures) if len(ranks) else plan, table


def _head(plan: StepPlan) -> bytes:
    names = ("planner", "mode", "stages", "ranks", "capacity", *_FIGURES)
    return json.dumps({name: getattr(plan, name) for name in names}).encode() + b"\n"


def _starts(sizes: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(sizes)])


def _items(start: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return the items of some rows, and the number of items of each of these rows."""
    sizes = start[rows + 1] - start[rows]
    ends = np.cumsum(sizes)
    return np.arange(sizes.sum()) + np.repeat(start[rows] - (ends - sizes), sizes), sizes


def _wide(buffer: bytes, at: int) -> tuple[Ints, int]:
    """Read the array whose narrow form is at a place, and the place after it."""
    width, count = buffer[at], int.from_bytes(buffer[at + 1 : at + 5], "little")
    least = int.from_bytes(buffer[at + 5 : at + _HEAD], "little", signed=True)
    if width == 0:
        return np.full(count, least, dtype=np.int64), at + _HEAD
    kind = "<i8" if width == 8 else f"<u{width}"
    return np.frombuffer(buffer, kind, count, at + _HEAD).astype(np.int64) + least, at + _HEAD + width * count


@njit
def _narrow(values: Ints) -> Buffer:
    """Return an array in its narrow form."""
    buffer = np.empty(_HEAD + 8 * len(values), np.uint8)
    return buffer[: _write(buffer, 0, values)]


@njit
def _joined(values: Ints, begin: Ints, end: Ints) -> tuple[Buffer, Ints]:
    """Return the narrow forms of values[begin : end], for each host and array [H, A], and where each host ends, [H]."""
    most = 0
    for host in range(len(begin)):
        for array in range(begin.shape[1]):
            most += _HEAD + 8 * (end[host, array] - begin[host, array])
    buffer, ends, at = np.empty(most, np.uint8), np.empty(len(begin), np.int64), 0
    for host in range(len(begin)):
        for array in range(begin.shape[1]):
            at = _write(buffer, at, values[begin[host, array] : end[host, array]])
        ends[host] = at
    return buffer[:at], ends


@njit
def _write(buffer: Buffer, at: int, values: Ints) -> int:
    """Write the narrow form of an array at a place, and return the place after it."""
    least, most = 0, 0
    if len(values):
        least, most = values.min(), values.max()
    span, width = most - least, 8
    if span < 0 or span >= 1 << 32:  # it is negative if it exceeds 63 bits
        least = 0
    else:
        width = 0 if span == 0 else 1 if span < 1 << 8 else 2 if span < 1 << 16 else 4
    buffer[at] = width
    at = _write_integer(buffer, at + 1, len(values), 4)
    at = _write_integer(buffer, at, least, 8)
    if width > 0:
        for value in values:
            at = _write_integer(buffer, at, value - least, width)
    return at


@njit
def _write_integer(buffer: Buffer, at: int, value: int, width: int) -> int:
    """Write the lowest bytes of an integer at a place, and return the place after them."""
    for place in range(width):
        buffer[at + place] = value >> 8 * place & 255
    return at + width
