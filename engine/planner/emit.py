"""From a planner's choice to the plan: the only place that builds a StepPlan.

A planner says which sequences run together, on which rings, in one global order of groups. A rank gets one micro-batch
for each group that it takes part in:

```
 group 0: sequence 0 on ranks 0 1, sequence 3 on rank 2      rank 0: [0]   [1 2]
 group 1: sequences 1 and 2 on rank 0                        rank 1: [0]
                                                             rank 2: [3]
 gangs: {0 on 0 and 1}, {3 on 2}, {1 2 on 0}                 rank 3: idle
```
Note: [why rings cannot deadlock] Gangs are numbered along the global order and each rank runs its micro-batches in that
order. So of all gangs that are not finished the first one is next on each of its ranks: it can always run. In a
pipeline, whose stages run ahead, that is so if each gang has the same place on all of its ranks (order.py).
Letters: S sequences, P ranks, K shards, M micro-batches (plan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from engine.compiled import kernel
from engine.errors import PlanError
from engine.planner.gangs import components, numbered
from engine.planner.plan import Ints, StepPlan
from engine.planner.rows import grouped, out_of_range, short_row

Ring = Sequence[int] | Ints
Group = Sequence[tuple[int, Ring]]  # (sequence, ordered ranks of its ring)


class Placement(NamedTuple):
    """Which sequences run together, and on which rings; groups are in global order, numbered without large holes."""

    lengths: Ints  # [S]
    group: Ints  # [S]
    ring_start: Ints  # [S + 1]
    ring_ranks: Ints  # [K]
    offload: Ints | None = None  # [S] ppm; a micro-batch takes the largest of its sequences


def emit(
    name: str,
    mode: str,
    ranks: int,
    capacity: int,
    lengths: Ints,
    groups: Sequence[Group],
    offload: Ints | None = None,
    stages: int = 1,
) -> StepPlan:
    """Return the plan of `groups`, in global order. Each sequence is in exactly one group."""
    rings: list[Ring] = [()] * len(lengths)
    group = np.empty(len(lengths), dtype=np.int64)
    for number, members in enumerate(groups):
        for sequence, ring in members:
            rings[sequence] = ring
            group[sequence] = number
    ring_start = np.fromiter(accumulate(map(len, rings), initial=0), dtype=np.int64, count=len(rings) + 1)
    ring_ranks = np.concatenate([np.asarray(ring, dtype=np.int64) for ring in rings])
    return build(name, mode, ranks, capacity, Placement(lengths, group, ring_start, ring_ranks, offload), stages)


def build(name: str, mode: str, ranks: int, capacity: int, placed: Placement, stages: int = 1) -> StepPlan:
    """Return the plan of a placement. In lockstep mode a group is a slot."""
    _check(ranks, placed.group, placed.ring_start, placed.ring_ranks)
    lengths, group, ring_start, ring_ranks, offload = placed
    groups = int(group.max()) + 1
    sequences = grouped(group, groups)[1]
    place = _in_slots if mode == "lockstep" else _in_turn
    shard_micro, micro_start, micro_group = place(group, groups, sequences, ring_start, ring_ranks, ranks)
    micro_batches = len(micro_group)
    shard_start, shard_order = grouped(shard_micro, micro_batches)  # by sequence: members agree on the order of rings
    order = grouped(micro_group, groups + 1)[1]  # the global one, ranks ascending in each group
    return StepPlan(
        planner=name,
        mode=mode,
        stages=stages,
        ranks=ranks,
        capacity=capacity,
        lengths=lengths,
        ring_start=ring_start,
        ring_ranks=ring_ranks,
        micro_start=micro_start,
        shard_start=shard_start,
        shard_order=shard_order,
        gang=numbered(components(shard_micro, ring_start, micro_batches), order),
        slot=micro_group if mode == "lockstep" else np.full(micro_batches, -1),
        offload=_none(micro_batches) if offload is None else _most(offload, shard_micro, ring_start, micro_batches),
    )


def _check(ranks: int, group: Ints, ring_start: Ints, ring_ranks: Ints) -> None:
    """Refuse what the kernels would stumble over; all else is for `verify`."""
    at = out_of_range(ring_ranks, 0, ranks)
    if at >= 0:
        raise PlanError(0, f"ring_ranks[{at}] is {ring_ranks[at]}")
    row = short_row(ring_start, len(ring_ranks), 1)
    if row >= 0 or len(group) == 0 or len(ring_start) != len(group) + 1 or ring_start[0] != 0:
        raise PlanError(0, "each sequence of a plan has one group and one ring of at least one rank")
    if group.min() < 0:
        raise PlanError(0, f"a group has the number {group.min()}")


def _none(micro_batches: int) -> Ints:
    return np.zeros(micro_batches, dtype=np.int64)


@kernel
def _in_turn(
    group: Ints, groups: int, sequences: Ints, ring_start: Ints, ring_ranks: Ints, ranks: int
) -> tuple[Ints, Ints, Ints]:
    """Return each shard's micro-batch, [K], where each rank's begin, [P + 1], and each micro-batch's group, [M].

    `sequences` come in the order of groups. A rank without any work has one micro-batch, behind all groups.
    """
    latest = np.full(ranks, -1)  # by rank: the group of its latest micro-batch
    count = np.zeros(ranks, np.int64)
    shard_micro = np.empty(len(ring_ranks), np.int64)
    for sequence in sequences:
        for shard in range(ring_start[sequence], ring_start[sequence + 1]):
            rank = ring_ranks[shard]
            if latest[rank] != group[sequence]:
                latest[rank] = group[sequence]
                count[rank] += 1
            shard_micro[shard] = count[rank] - 1
    micro_start = np.zeros(ranks + 1, np.int64)
    for rank in range(ranks):
        micro_start[rank + 1] = micro_start[rank] + max(count[rank], 1)
    micro_group = np.full(micro_start[-1], groups)
    for sequence in range(len(group)):
        for shard in range(ring_start[sequence], ring_start[sequence + 1]):
            shard_micro[shard] += micro_start[ring_ranks[shard]]
            micro_group[shard_micro[shard]] = group[sequence]
    return shard_micro, micro_start, micro_group


@kernel
def _in_slots(
    group: Ints, slots: int, sequences: Ints, ring_start: Ints, ring_ranks: Ints, ranks: int
) -> tuple[Ints, Ints, Ints]:
    """Return the same where each rank has one micro-batch in every slot."""
    shard_micro = np.empty(len(ring_ranks), np.int64)
    for sequence in sequences:
        for shard in range(ring_start[sequence], ring_start[sequence + 1]):
            shard_micro[shard] = ring_ranks[shard] * slots + group[sequence]
    return shard_micro, np.arange(ranks + 1) * slots, np.arange(ranks * slots) % slots


@kernel
def _most(offload: Ints, shard_micro: Ints, ring_start: Ints, micro_batches: int) -> Ints:
    most = np.zeros(micro_batches, np.int64)
    for sequence in range(len(offload)):
        for shard in range(ring_start[sequence], ring_start[sequence + 1]):
            most[shard_micro[shard]] = max(most[shard_micro[shard]], offload[sequence])
    return most
