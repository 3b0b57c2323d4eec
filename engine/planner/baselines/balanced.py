"""Our reading of ByteScale's balance scheduler without pipelines (algorithm 2, DP-Balance).

Each sequence gets the ring degree of equation 3, as in naive. Ranks get equal work by running different numbers of
micro-batches. What the paper leaves open, and what we chose:

- Buckets and delta. The paper feeds ranks "more than delta behind the busiest" from buckets in descending order of
  length. We feed one sequence at a time to the least busy ranks: delta = 0, one sequence per bucket, which is longest
  processing time first. Larger buckets only matter if several are used in turn, as in pipelines.
- Rings. A ring takes the neighbouring ranks that are free the earliest (rings.py). Members that are free before the
  others wait. Short sequences are placed last and fill these gaps first.
- Packing. Short sequences are assigned one by one, which balances better than assigning full bins. Each rank packs
  its own best-fit into micro-batches of C tokens.

```
 rank 0  [ring A     ][ring B  ][short]      rank 2 would wait for rank 1:
 rank 1  [ring A     ][ring B  ][short]      its gap takes short sequences
 rank 2  [short][gap ][ring B  ][short]
```
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heapreplace

import numpy as np

from engine.planner.baselines.balanced_pp import balanced_pp
from engine.planner.baselines.pack import best_fit
from engine.planner.plan.emit import Group, emit
from engine.planner.plan.rings import folded, least_busy
from engine.planner.plan.step_plan import StepPlan
from engine.planner.ratios import equation_3
from engine.planner.settings import PlanSettings
from engine.units import Ints


@dataclass
class _Span:
    """Time of one rank for short sequences, in ns: a gap of `room` ns from `start` on, or all time after its rings."""

    rank: int
    start: int
    room: int = 0  # 0 after the rings, where time is unlimited
    sequences: list[int] = field(default_factory=list)


def balanced(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan a step: long sequences first, each on the least busy ranks, then short ones in the gaps and at the end.

    The plan is in free mode; in pipeline mode `balanced_pp` makes it. All ranks use the smallest capacity.
    """
    if settings.mode == "pipeline":
        return balanced_pp(lengths, settings)
    capacity, fixed = settings.least_capacity, settings.costs.fixed
    cost = settings.costs.sequence(lengths)
    degrees, offload = equation_3(lengths, settings)
    order = np.argsort(-lengths, kind="stable")
    timed: list[tuple[int, Group]] = []  # groups, each with the earliest time at which it may start

    # Long sequences first, each on the least busy ranks. A rank that is free before the others of its ring has a gap.
    load = np.zeros(settings.ranks, dtype=np.int64)  # time at which each rank is free
    gaps: list[_Span] = []
    for sequence in order[lengths[order] > capacity].tolist():
        degree = int(degrees[sequence])
        ring = folded(least_busy(load, degree), degree, settings.ranks)
        start = int(load[ring].max())
        early = ring[load[ring] < start]
        gaps += [_Span(rank, at, start - at) for rank, at in zip(early.tolist(), load[early].tolist(), strict=True)]
        load[ring] = start + cost[sequence] // degree + fixed
        timed.append((start, [(sequence, ring)]))

    # Each short sequence goes into the widest gap if it fits there, else to the rank that is done the earliest.
    # Its price includes its part of a micro-batch's fixed cost.
    ends = [_Span(rank, start) for rank, start in enumerate(load.tolist())]
    prices = (cost + fixed * lengths // capacity).tolist()
    widest = [(-span.room, number) for number, span in enumerate(gaps)]
    earliest = [(span.start, number) for number, span in enumerate(ends)]
    heapify(widest)
    heapify(earliest)
    for sequence in order[lengths[order] <= capacity].tolist():
        fits = bool(widest) and -widest[0][0] >= prices[sequence]
        heap, spans = (widest, gaps) if fits else (earliest, ends)
        key, number = heap[0]
        heapreplace(heap, (key + prices[sequence], number))
        spans[number].sequences.append(sequence)

    for span in gaps + ends:
        for items in best_fit(lengths[span.sequences].tolist(), capacity):
            timed.append((span.start, [(span.sequences[item], (span.rank,)) for item in items]))
    timed.sort(key=lambda item: item[0])
    return emit("balanced", "free", settings.ranks, settings.capacity, lengths, [group for _, group in timed], offload)
