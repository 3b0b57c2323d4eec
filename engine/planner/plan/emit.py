"""Build a StepPlan from what a planner chose: the groups and the rings of the sequences.

A planner chooses which sequences run together (a group), on which rings they run, and one global order of the groups.
A rank gets one micro-batch for each group in which it has a shard:

```
 group 0: sequence 0 on ranks 0 1, sequence 3 on rank 2      rank 0: [0]   [1 2]
 group 1: sequences 1 and 2 on rank 0                        rank 1: [0]
                                                             rank 2: [3]
 gangs: {0 on 0 and 1}, {3 on 2}, {1 2 on 0}                 rank 3: idle
```
Note: [why rings cannot deadlock]. Gangs are numbered along the global order, and every rank runs its micro-batches in
ascending order of gangs. Take the unfinished gang with the lowest number. All of its ranks have finished every gang
before it, so it is the next one on each of them, and it runs. By induction all gangs finish. In a pipeline this is not
enough, because the stages of a rank run ahead of each other; there a gang must also have the same place on all of its
ranks (order.py).
Letters: S slices, P ranks, K shards, M micro-batches (step_plan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from engine.compiled import njit, njit_in_place
from engine.errors import PlanError
from engine.planner.plan.gangs import components, ends_alone, numbered
from engine.planner.plan.order import one_f_one_b
from engine.planner.plan.rows import first_out_of_range, first_short_row, grouped
from engine.planner.plan.step_plan import StepPlan
from engine.units import Ints

_NONE = np.empty(0, dtype=np.int64)
Ring = Sequence[int] | Ints
Group = Sequence[tuple[int, Ring]]  # (sequence, ordered ranks of its ring)


class Placement(NamedTuple):
    """Group and ring of each slice. Groups run in ascending order of their numbers, which should have few gaps."""

    lengths: Ints  # [S]
    group: Ints  # [S]
    ring_start: Ints  # [S + 1] the ring of slice s is ring_ranks[ring_start[s] : ring_start[s + 1]]
    ring_ranks: Ints  # [K]
    offload: Ints | None = None  # [S] ppm; a micro-batch gets the largest ratio of its slices
    before: Ints | None = None  # [S] tokens of the earlier slices of its sequence; none if no sequence is cut
    team: Ints | None = None  # [S] parts of its ring that form a team; 1 if none


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
    """Build a plan from `groups` in their global order. Every sequence must be in exactly one group.

    `name` is the planner's name, `lengths` and `offload` (ppm) are [S].
    """
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
    """Build a plan from a placement. In lockstep mode a group's number is its slot; a pipeline runs 1F1B.

    `name` is the planner's name. Raises PlanError(0) for ring ranks or groups that are out of range.
    """
    lengths, group, ring_start, ring_ranks, offload, before, team = placed
    # Compiled code does not check bounds, so check here what it indexes with; `verify` checks the rest.
    at = first_out_of_range(ring_ranks, 0, ranks)
    if at >= 0:
        raise PlanError(0, f"ring_ranks[{at}] is {ring_ranks[at]}")
    row = first_short_row(ring_start, len(ring_ranks), 1)
    if row >= 0 or len(group) == 0 or len(ring_start) != len(group) + 1 or ring_start[0] != 0:
        raise PlanError(0, "each sequence of a plan has one group and one ring of at least one rank")
    if group.min() < 0:
        raise PlanError(0, f"a group has the number {group.min()}")

    groups = int(group.max()) + 1
    if mode == "lockstep":  # one micro-batch per rank and slot
        micro_start = np.arange(ranks + 1) * groups
        micro_group = np.arange(ranks * groups) % groups
        shard_micro = ring_ranks * groups + np.repeat(group, np.diff(ring_start))
    else:
        sequences = grouped(group, groups)[1]
        shard_micro, micro_start, micro_group = _by_group(group, groups, sequences, ring_start, ring_ranks, ranks)
    micro_batches = len(micro_group)
    # The shards of a micro-batch are sorted by sequence, so all members of a gang agree on the order of its rings.
    shard_start, shard_order = grouped(shard_micro, micro_batches)
    global_order = grouped(micro_group, groups + 1)[1]  # ranks ascend in each group
    most_offload = np.zeros(micro_batches, dtype=np.int64)
    if offload is not None:
        _raise_to(most_offload, offload, ring_start, shard_micro)
    gang = numbered(components(shard_micro, ring_start, micro_batches), global_order)
    return StepPlan(
        planner=name,
        mode=mode,
        stages=stages,
        ranks=ranks,
        capacity=capacity,
        lengths=lengths,
        before=np.zeros_like(lengths) if before is None else before,
        team=np.ones_like(lengths) if team is None else team,
        ring_start=ring_start,
        ring_ranks=ring_ranks,
        micro_start=micro_start,
        shard_start=shard_start,
        shard_order=shard_order,
        gang=gang,
        slot=micro_group if mode == "lockstep" else np.full(micro_batches, -1),
        offload=most_offload,
        overlap=ends_alone(gang, micro_start) if mode == "free" else np.zeros(ranks, dtype=np.int64),
        passes=one_f_one_b(int(np.diff(micro_start).max()), stages) if mode == "pipeline" else _NONE,
    )


@njit
def _by_group(
    group: Ints, groups: int, sequences: Ints, ring_start: Ints, ring_ranks: Ints, ranks: int
) -> tuple[Ints, Ints, Ints]:
    """Give each rank one micro-batch per group in which it has a shard, in the order of groups.

    Returns the micro-batch of each shard, [K], the first micro-batch of each rank, [P + 1], and the group of each
    micro-batch, [M]. `sequences` are sorted by group. A rank without work gets one idle micro-batch in group `groups`.
    """
    latest = np.full(ranks, -1)  # by rank: the group of its latest micro-batch
    count = np.zeros(ranks, np.int64)
    shard_micro = np.empty(len(ring_ranks), np.int64)  # first counted on its rank, then over all ranks
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


@njit_in_place
def _raise_to(most: Ints, offload: Ints, ring_start: Ints, shard_micro: Ints) -> None:
    """Raise the entry of each micro-batch in `most` [M] to those of its slices in `offload` [S]."""
    for at in range(len(offload)):
        if offload[at] > 0:
            for shard in range(ring_start[at], ring_start[at + 1]):
                most[shard_micro[shard]] = max(most[shard_micro[shard]], offload[at])
