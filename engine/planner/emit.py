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
order. So of all gangs that are not finished the first one is next on each of its ranks: it can always run.
Letters: S sequences, P ranks, K shards, M micro-batches (plan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from engine.planner.gangs import components
from engine.planner.plan import Ints, StepPlan

Ring = Sequence[int] | Ints
Group = Sequence[tuple[int, Ring]]  # (sequence, ordered ranks of its ring)


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
    return build(name, mode, ranks, capacity, lengths, group, ring_start, ring_ranks, offload, stages)


def build(
    name: str,
    mode: str,
    ranks: int,
    capacity: int,
    lengths: Ints,
    group: Ints,
    ring_start: Ints,
    ring_ranks: Ints,
    offload: Ints | None = None,
    stages: int = 1,
) -> StepPlan:
    """Return the plan of sequences in groups, [S], on rings, [S + 1] and [K].

    In lockstep mode a group is a slot. `offload` [S] is in ppm; a micro-batch takes the largest of its sequences.
    """
    shard_cell = np.repeat(group, np.diff(ring_start)) * ranks + ring_ranks
    cells = _cells(mode, ranks, shard_cell)  # [M] ascending: group by group, ranks ascending in each
    shard_cell = np.searchsorted(cells, shard_cell)
    label = components(shard_cell, ring_start, len(cells))

    by_rank = np.argsort(cells % ranks, kind="stable")  # a rank's micro-batches stay in the global order
    micro_of_cell = np.empty_like(by_rank)
    micro_of_cell[by_rank] = np.arange(len(cells))
    shard_micro = micro_of_cell[shard_cell]
    shard_order = np.argsort(shard_micro, kind="stable")  # by sequence, so that members agree on the order of rings
    return StepPlan(
        planner=name,
        mode=mode,
        stages=stages,
        ranks=ranks,
        capacity=capacity,
        lengths=lengths,
        ring_start=ring_start,
        ring_ranks=ring_ranks,
        micro_start=np.searchsorted((cells % ranks)[by_rank], np.arange(ranks + 1)),
        shard_start=np.searchsorted(shard_micro[shard_order], np.arange(len(cells) + 1)),
        shard_order=shard_order,
        gang=np.unique(label, return_inverse=True)[1][by_rank],
        slot=(cells // ranks)[by_rank] if mode == "lockstep" else np.full(len(cells), -1, dtype=np.int64),
        offload=_offload(offload, shard_micro, ring_start, len(cells)),
    )


def _offload(offload: Ints | None, shard_micro: Ints, ring_start: Ints, micro_batches: int) -> Ints:
    most = np.zeros(micro_batches, dtype=np.int64)
    if offload is not None:
        np.maximum.at(most, shard_micro, np.repeat(offload, np.diff(ring_start)))
    return most


def _cells(mode: str, ranks: int, busy: Ints) -> Ints:
    """Return the places group x ranks + rank that hold a micro-batch, idle ones included.

    In lockstep mode each rank has one in every slot; else a rank without any work has one, behind all groups.
    """
    groups = int(busy.max()) // ranks + 1
    if mode == "lockstep":
        return np.arange(groups * ranks, dtype=np.int64)
    idle = np.setdiff1d(np.arange(ranks, dtype=np.int64), busy % ranks)
    return np.union1d(busy, groups * ranks + idle)
