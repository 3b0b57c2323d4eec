"""The paper's balance scheduler, in its form without pipelines (ByteScale, algorithm 2, DP-Balance).

As naive, each sequence gets the ranks of equation 3; and ranks get equal work by running different numbers of
micro-batches. What the paper leaves unsaid, and what we chose:

- Buckets and delta. Ranks "more than delta behind the busiest" are fed from buckets in descending order of length. We
  feed one sequence at a time to the least busy ranks, which is delta = 0 and one sequence a bucket: longest processing
  time first. Buckets of more matter only where several are fed in turn, as pipelines do.
- A ring takes the neighbouring ranks that are free the earliest (rings.py). Those that are free before the others of
  their ring wait; the short sequences, which come last, fill these gaps first.
- Packing. Short sequences are dealt out one by one, which balances better than dealing out full bins, and each
  rank's share is packed best-fit into micro-batches of C tokens.

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

from engine.planner.balanced_pp import balanced_pp
from engine.planner.emit import Group, emit
from engine.planner.memory import equation_3
from engine.planner.pack import best_fit
from engine.planner.plan import Ints, StepPlan
from engine.planner.rings import folded, least_busy
from engine.planner.settings import PlanSettings


@dataclass
class _Share:
    """Short sequences that one rank runs from `start` on, in cost units: in a gap of `room`, or behind its rings."""

    rank: int
    start: int
    room: int = 0
    sequences: list[int] = field(default_factory=list)


Timed = list[tuple[int, Group]]  # groups with the time at which they may start


def balanced(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan a step: long sequences first, each on the least busy ranks, then short ones into what is left.

    In a pipeline the other form plans (balanced_pp.py). It knows one capacity, that of the rank that holds the least.
    """
    if settings.mode == "pipeline":
        return balanced_pp(lengths, settings)
    capacity = settings.least_capacity
    order = np.argsort(-lengths, kind="stable")
    load = np.zeros(settings.ranks, dtype=np.int64)
    degrees, offload = equation_3(lengths, settings)
    timed, gaps = _place_rings(lengths, order[lengths[order] > capacity], degrees, settings, load)
    ends = [_Share(rank, start) for rank, start in enumerate(load.tolist())]
    # A micro-batch costs `fixed`, and a sequence pays for its part of one.
    prices = settings.costs.sequence(lengths) + settings.costs.fixed * lengths // capacity
    _deal(order[lengths[order] <= capacity].tolist(), prices.tolist(), gaps, ends)
    for share in gaps + ends:
        timed += _packed(share, lengths, capacity)
    timed.sort(key=lambda item: item[0])
    return emit("balanced", "free", settings.ranks, settings.capacity, lengths, [group for _, group in timed], offload)


def _place_rings(
    lengths: Ints, order: Ints, degrees: Ints, settings: PlanSettings, load: Ints
) -> tuple[Timed, list[_Share]]:
    """Return the rings and the gaps before them; raises `load` [P] to the time at which each rank is free."""
    cost = settings.costs.sequence(lengths) // degrees + settings.costs.fixed
    timed: Timed = []
    gaps: list[_Share] = []
    for sequence in order.tolist():
        degree = int(degrees[sequence])
        ring = folded(least_busy(load, degree), degree, settings.ranks)
        start = int(load[ring].max())
        early = ring[load[ring] < start]
        gaps += [_Share(rank, at, start - at) for rank, at in zip(early.tolist(), load[early].tolist(), strict=True)]
        load[ring] = start + cost[sequence]
        timed.append((start, [(sequence, ring)]))
    return timed, gaps


def _deal(order: list[int], prices: list[int], gaps: list[_Share], ends: list[_Share]) -> None:
    """Deal out short sequences: into the widest gap while it has room, else to the rank that is done the earliest."""
    widest = [(-share.room, number) for number, share in enumerate(gaps)]
    earliest = [(share.start, number) for number, share in enumerate(ends)]
    heapify(widest)
    heapify(earliest)
    for sequence in order:
        price = prices[sequence]
        fits = bool(widest) and -widest[0][0] >= price
        heap, shares = (widest, gaps) if fits else (earliest, ends)
        key, number = heap[0]
        heapreplace(heap, (key + price, number))
        shares[number].sequences.append(sequence)


def _packed(share: _Share, lengths: Ints, capacity: int) -> Timed:
    """Return the micro-batches of a share."""
    sizes = [int(lengths[sequence]) for sequence in share.sequences]
    bins = best_fit(sizes, capacity)
    return [(share.start, [(share.sequences[item], (share.rank,)) for item in items]) for items in bins]
