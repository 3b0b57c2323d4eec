"""The baseline: a fixed mesh of data-parallel groups, each a ring of context-parallel ranks, with packing.

It is as strong as the paper's baseline: the smallest degree that divides the world size and fits the longest allowed
sequence, packed micro-batches, balanced causal shards, and micro-batches assigned by cost.
"""

from __future__ import annotations

import heapq

import numpy as np

from engine.planner.baselines.pack import best_fit
from engine.planner.plan.emit import Group, emit
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.units import Ints


def static(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan a step in free mode on a mesh of DP x CP ranks; every sequence is split over all CP ranks of its group.

    Sequences are packed best-fit, in descending order of ceil(s / CP), the largest shard of a sequence of s tokens, so
    that micro-batches fit all ranks of a group. Micro-batches go to groups by longest processing time first. Very short
    sequences leave ranks of a ring without a token, as in real static context parallelism. All ranks use the
    smallest capacity.
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
    """Context-parallel degree of the run: the smallest divisor of the number of ranks at which `context` tokens fit.

    The number of ranks if `context` tokens do not fit at any degree.
    """
    ranks = settings.ranks
    divisors = (cp for cp in range(1, ranks) if ranks % cp == 0)
    return next((cp for cp in divisors if cp * settings.least_capacity >= settings.context), ranks)
