"""Our reading of ByteScale's algorithm 1, naive HDP: each sequence gets the ranks it needs, and nothing is balanced.

Offload ratio and degree D are those of equation 3; without offload D = ceil(s / C) for s tokens. What the paper leaves
open, and what we chose: sequences come in the order of the step; each ring takes the next D ranks, round-robin, then
each pack of short sequences takes the next rank. The paper does not mention pipelines; there, and in lockstep mode,
micro-batches keep this order where possible (modes.py).
"""

from __future__ import annotations

import numpy as np

from engine.planner.baselines.pack import best_fit
from engine.planner.plan.emit import Group, emit
from engine.planner.plan.rings import folded
from engine.planner.plan.step_plan import StepPlan
from engine.planner.ratios import equation_3
from engine.planner.settings import PlanSettings
from engine.units import Ints


def naive(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan a step in free mode: rings for long sequences, best-fit packs of C tokens for the others, round-robin.

    C is the smallest capacity of all ranks.
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
