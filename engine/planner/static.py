"""The baseline: a fixed mesh of data-parallel groups, each a ring of context-parallel ranks, with packing.

As strong as the paper's baseline: the least degree that divides the world and holds the longest sequence
that the run allows, packed micro-batches, balanced causal shards, and packed micro-batches dealt out by cost.
"""

from __future__ import annotations

import heapq

import numpy as np

from engine.planner.emit import Group, emit
from engine.planner.pack import best_fit
from engine.planner.plan import Ints, StepPlan
from engine.planner.settings import PlanSettings


def static(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan a step on a mesh of DP x CP ranks; every sequence lies on all CP ranks of its group.

    Shards are packed best-fit in descending order by their size ceil(s / CP), so that each rank of a group fits. Packed
    bins go to groups by longest processing time first. Short sequences leave ranks of a ring without a token, as in
    real static context parallelism. The mesh knows one capacity: that of the rank that holds the least.
    """
    cp = degree(settings)
    order = np.argsort(-lengths, kind="stable")
    bins = best_fit((-(-lengths[order] // cp)).tolist(), settings.least_capacity)
    cost = settings.costs.sequence(lengths)
    members = [order[items] for items in bins]
    bin_cost = np.array([cost[sequences].sum() for sequences in members]) // cp + settings.costs.fixed
    groups = settings.ranks // cp
    free = [(0, group) for group in range(groups)]
    rings = [np.arange(group * cp, (group + 1) * cp, dtype=np.int64) for group in range(groups)]
    emitted: list[Group] = []
    for number in np.argsort(-bin_cost, kind="stable").tolist():
        load, group = free[0]
        heapq.heapreplace(free, (load + int(bin_cost[number]), group))
        emitted.append([(sequence, rings[group]) for sequence in members[number].tolist()])
    return emit("static", "free", settings.ranks, settings.capacity, lengths, emitted)


def degree(settings: PlanSettings) -> int:
    """Return CP, the same for the whole run: the least divisor of the world size whose ranks hold `context`."""
    ranks = settings.ranks
    divisors = (cp for cp in range(1, ranks) if ranks % cp == 0)
    return next((cp for cp in divisors if cp * settings.least_capacity >= settings.context), ranks)
