"""When each gang of a plan runs, on ranks as fast as the costs say: what planners compare and the simulator shows.

Free: a gang starts when all its ranks have come to it. Lockstep: a slot starts when all ranks have. In a pipeline each
pass of a gang runs on a stage as early as the order of passes lets it, 1F1B on each stage of each rank
(planner/order.py); a stage holds an n-th of the layers, so it takes an n-th of a gang's time; what goes from stage to
stage is small beside that and is not counted.
Letters: G gangs, M micro-batches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import kernel
from engine.planner.durations import Floats, Gangs, by_slot, gang_times
from engine.planner.order import edges, gang_order, node_order
from engine.planner.plan import Ints, StepPlan
from engine.planner.rows import grouped
from engine.planner.settings import PlanSettings


class Timing(NamedTuple):
    """Nanoseconds from the start of the step; in a pipeline a micro-batch's are those on its first stage."""

    start: Floats  # [M]
    stop: Floats  # [M]
    makespan: float  # when the last rank is done with its micro-batches


def makespan(plan: StepPlan, settings: PlanSettings) -> float:
    """Return how long a plan takes, ns."""
    return timing(plan, gang_times(plan, settings.costs, settings.cluster), settings.costs.slot).makespan


def timing(plan: StepPlan, gangs: Gangs, slot_ns: int) -> Timing:
    """Return when the micro-batches of a plan run whose gangs take so long; a lockstep slot costs `slot_ns` besides."""
    if plan.mode == "pipeline":
        return _stages(plan, gangs)
    start, stop = _slots(plan, gangs, slot_ns) if plan.mode == "lockstep" else _free(plan, gangs)
    return Timing(start, stop, float(stop.max()))


def _free(plan: StepPlan, gangs: Gangs) -> tuple[Floats, Floats]:
    first, members = grouped(plan.gang, len(gangs.forward))
    return _meeting(gang_order(plan), first, members, plan.micro_rank, plan.ranks, gangs.forward + gangs.backward)


def _slots(plan: StepPlan, gangs: Gangs, slot_ns: int) -> tuple[Floats, Floats]:
    """Return start and stop of each micro-batch where all ranks meet in each slot, in each pass."""
    forward, backward = by_slot(plan, gangs)
    ends = np.cumsum(forward + backward + slot_ns)
    return np.concatenate([[0.0], ends[:-1]])[plan.slot], ends[plan.slot]


def _stages(plan: StepPlan, gangs: Gangs) -> Timing:
    stages = plan.stages
    seconds = np.repeat(np.stack([gangs.forward, gangs.backward], axis=1) / stages, stages, axis=0).ravel()
    before, after = edges(plan)
    start, following = grouped(before, len(seconds))
    end = _longest(node_order(plan), start, after[following], seconds)
    first = 2 * plan.gang * stages
    return Timing(end[first] - seconds[first], end[first + 1], float(end.max()))


@kernel
def _meeting(order: Ints, first: Ints, members: Ints, rank: Ints, ranks: int, seconds: Floats) -> tuple[Floats, Floats]:
    """Return start and stop of each micro-batch where gangs run in `order`, each as soon as all its ranks are free.

    Gang g has micro-batches `members[first[g] : first[g + 1]]`.
    """
    free = np.zeros(ranks)
    start, stop = np.zeros(len(members)), np.zeros(len(members))
    for g in order:
        begin = 0.0
        for m in members[first[g] : first[g + 1]]:
            begin = max(begin, free[rank[m]])
        for m in members[first[g] : first[g + 1]]:
            start[m], stop[m] = begin, begin + seconds[g]
            free[rank[m]] = stop[m]
    return start, stop


@kernel
def _longest(order: Ints, start: Ints, following: Ints, seconds: Floats) -> Floats:
    """Return when each node ends, if it begins when all before it have: the longest path to it."""
    begin, end = np.zeros(len(seconds)), np.zeros(len(seconds))
    for node in order:
        end[node] = begin[node] + seconds[node]
        for place in range(start[node], start[node + 1]):
            begin[following[place]] = max(begin[following[place]], end[node])
    return end
