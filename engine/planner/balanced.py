"""The paper's algorithm 2, the balance scheduler, in its form without pipelines (PAPER.md 1.5).

As naive, each sequence gets D = ceil(s / C) ranks; and ranks get equal work by running different numbers of
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

import heapq
from dataclasses import dataclass, field

import numpy as np

from engine.planner.emit import Group, emit
from engine.planner.pack import best_fit
from engine.planner.plan import Ints, StepPlan
from engine.planner.rings import folded, least_busy
from engine.planner.settings import PlanSettings


@dataclass
class _Share:
    """Short sequences that one rank runs from `start` on; a gap before a ring, or the end of the rank's step."""

    rank: int
    start: int
    sequences: list[int] = field(default_factory=list)


Timed = list[tuple[int, Group]]  # groups with the time at which they may start, in cost units


def balanced(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan a step: long sequences first, each on the least busy ranks, then short ones into what is left."""
    order = np.argsort(-lengths, kind="stable")
    load = np.zeros(settings.ranks, dtype=np.int64)
    gaps: list[tuple[int, int, int]] = []
    timed = _place_rings(lengths, order[lengths[order] > settings.capacity], settings, load, gaps)
    for share in _deal(lengths, order[lengths[order] <= settings.capacity], settings, load, gaps):
        timed += _packed(share, lengths, settings.capacity)
    timed.sort(key=lambda item: item[0])
    groups = [group for _, group in timed]
    return emit("balanced", "free", settings.ranks, settings.capacity, lengths, groups)


def _place_rings(
    lengths: Ints, order: Ints, settings: PlanSettings, load: Ints, gaps: list[tuple[int, int, int]]
) -> Timed:
    """Return the rings, and raise `load` [P]; adds to `gaps` each (minus its width, rank, start)."""
    degrees = -(-lengths // settings.capacity)
    cost = settings.costs.sequence(lengths) // degrees + settings.costs.fixed
    timed: Timed = []
    for sequence in order.tolist():
        degree = int(degrees[sequence])
        ring = folded(least_busy(load, degree), degree, settings.ranks)
        start = int(load[ring].max())
        early = ring[load[ring] < start]
        gaps += [(at - start, rank, at) for rank, at in zip(early.tolist(), load[early].tolist(), strict=True)]
        load[ring] = start + cost[sequence]
        timed.append((start, [(sequence, ring)]))
    return timed


def _deal(
    lengths: Ints, order: Ints, settings: PlanSettings, load: Ints, gaps: list[tuple[int, int, int]]
) -> list[_Share]:
    """Return the shares of short sequences: into the widest gap while one is wide enough, else to the least busy rank.

    Each micro-batch costs `fixed`, so a sequence also pays for its part of one.
    """
    fixed = settings.costs.fixed
    cost = settings.costs.sequence(lengths) + fixed * lengths // settings.capacity
    wide = [(room + fixed, at, _Share(rank, at)) for room, rank, at in gaps]
    shares = [share for _, _, share in wide] + [_Share(rank, at) for rank, at in enumerate(load.tolist())]
    # The number breaks ties, so that shares are never compared.
    open_gaps = [(room, number) for number, (room, _, _) in enumerate(wide)]
    ends = [(share.start, number) for number, share in enumerate(shares[len(gaps) :], start=len(gaps))]
    heapq.heapify(open_gaps)
    heapq.heapify(ends)
    for sequence in order.tolist():
        price = int(cost[sequence])
        fits = bool(open_gaps) and -open_gaps[0][0] >= price
        heap = open_gaps if fits else ends
        key, number = heap[0]
        heapq.heapreplace(heap, (key + price, number))
        shares[number].sequences.append(sequence)
    return shares


def _packed(share: _Share, lengths: Ints, capacity: int) -> Timed:
    """Return the micro-batches of a share."""
    bins = best_fit(lengths[share.sequences].tolist() if share.sequences else [], capacity)
    return [(share.start, [(share.sequences[item], (share.rank,)) for item in items]) for items in bins]
