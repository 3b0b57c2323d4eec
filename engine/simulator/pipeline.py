"""A plan in stages: each pass of a gang through a stage as early as the order of passes lets it.

The order is 1F1B on each stage of each rank (planner/order.py). A stage holds an n-th of the layers, so it takes an
n-th of a gang's time; what goes from stage to stage is small beside that and is not counted.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.planner.durations import Floats, Gangs
from engine.planner.order import edges, node_order
from engine.planner.plan import Ints, StepPlan
from engine.planner.rows import grouped


def run_stages(plan: StepPlan, gangs: Gangs) -> tuple[Floats, Floats, float]:
    """Return when each micro-batch begins and ends on its first stage, [M], and when the last pass is done, ns."""
    stages = plan.stages
    seconds = np.repeat(np.stack([gangs.forward, gangs.backward], axis=1) / stages, stages, axis=0).ravel()
    before, after = edges(plan)
    start, following = grouped(before, len(seconds))
    end = _longest(node_order(plan), start, after[following], seconds)
    first = 2 * plan.gang * stages
    return end[first] - seconds[first], end[first + 1], float(end.max())


@njit(cache=True)
def _longest(order: Ints, start: Ints, following: Ints, seconds: Floats) -> Floats:
    """Return when each node ends, if it begins when all before it have: the longest path to it."""
    begin, end = np.zeros(len(seconds)), np.zeros(len(seconds))
    for node in order:
        end[node] = begin[node] + seconds[node]
        for place in range(start[node], start[node + 1]):
            begin[following[place]] = max(begin[following[place]], end[node])
    return end
