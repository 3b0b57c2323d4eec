"""The paper's algorithm 1, naive HDP: each sequence gets just the ranks it needs, nothing is balanced.

Ratio and degree are equation 3's; without offload D = ceil(s / C). What the paper leaves unsaid, and what we chose:
sequences come in the order of the step; a ring takes the next D ranks round the world, then each packed bin takes the
next one. Of pipelines it says nothing; there, as in slots, micro-batches keep this order where they can (lockstep.py).
"""

from __future__ import annotations

import numpy as np

from engine.planner.emit import Group, emit
from engine.planner.memory import equation_3
from engine.planner.pack import best_fit
from engine.planner.plan import Ints, StepPlan
from engine.planner.rings import folded
from engine.planner.settings import PlanSettings


def naive(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan a step: rings for the long, best-fit packs of C tokens for the rest, round-robin.

    It knows one capacity C: that of the rank that holds the least.
    """
    ranks, capacity = settings.ranks, settings.least_capacity
    degrees, offload = equation_3(lengths, settings)
    groups: list[Group] = []
    next_rank = 0
    for sequence in np.flatnonzero(lengths >= capacity).tolist():
        degree = int(degrees[sequence])
        groups.append([(sequence, folded(next_rank, degree, ranks))])
        next_rank = (next_rank + degree) % ranks
    short = np.flatnonzero(lengths < capacity)
    for items in best_fit(lengths[short].tolist(), capacity):
        groups.append([(sequence, (next_rank,)) for sequence in short[items].tolist()])
        next_rank = (next_rank + 1) % ranks
    return emit("naive", "free", ranks, settings.capacity, lengths, groups, offload)
