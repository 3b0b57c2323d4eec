"""A plan on imagined ranks: when each micro-batch runs, what it waits for, and what that makes of the step.

Times are nanoseconds from the start of the step. The order is that of the real thing: a gang's pass starts when each of
its ranks has come to it (planner/order.py), and in lockstep mode a slot when all ranks have.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from engine.planner.durations import Floats, Gangs, by_slot, gang_times
from engine.planner.order import gang_order
from engine.planner.plan import Ints, StepPlan
from engine.planner.settings import PlanSettings
from engine.simulator.pipeline import run_stages


@dataclass(frozen=True, eq=False)
class Timeline:
    """One row for each micro-batch, idle ones included; in a pipeline from its first stage's start to its end there."""

    rank: Ints  # [M]
    start: Ints  # [M]
    stop: Ints  # [M]
    micro_batch: Ints  # [M] the plan's number of it
    makespan: int  # when the last rank is done with its micro-batches
    compute: float  # mean over ranks, and their stages, of what they compute
    exposed: float  # mean of what they wait for transfers alone


def simulate(plan: StepPlan, settings: PlanSettings) -> Timeline:
    """Return when each micro-batch of a verified plan runs."""
    gangs = gang_times(plan, settings.costs, settings.cluster)
    if plan.mode == "pipeline":
        start, stop, makespan = run_stages(plan, gangs)
    elif plan.mode == "lockstep":
        start, stop = _slots(plan, gangs, settings.costs.slot)
        makespan = stop.max()
    else:
        order = gang_order(plan)
        start, stop = _free(order, plan.gang, plan.micro_rank, plan.ranks, gangs.forward + gangs.backward)
        makespan = stop.max()
    devices = plan.ranks * plan.stages  # each stage computes and waits for its part of the layers
    exposed = float(gangs.exposed[plan.gang].sum()) / devices
    compute = float(gangs.compute.sum()) / devices
    whole_start, whole_stop = (np.rint(times).astype(np.int64) for times in (start, stop))
    micro = np.arange(plan.micro_batches)
    return Timeline(plan.micro_rank, whole_start, whole_stop, micro, round(makespan), compute, exposed)


def balance(plan: StepPlan, settings: PlanSettings) -> float:
    """Return the mean over ranks of useful work, at the rate of uncut sequences, over the makespan; 1 is perfect."""
    return useful(plan.lengths, settings) / simulate(plan, settings).makespan


def useful(lengths: Ints, settings: PlanSettings) -> float:
    """Return the mean work of a rank, ns: all sequences, uncut, over the speed of all ranks and their stages."""
    work = int(settings.costs.sequence(lengths).sum())
    return work / (int(settings.cluster.speed.sum()) / 100) / settings.stages


@njit(cache=True)
def _free(order: Ints, gang: Ints, rank: Ints, ranks: int, seconds: Floats) -> tuple[Floats, Floats]:
    """Return start and stop of each micro-batch where gangs run in `order`, each as soon as all its ranks are free."""
    members = np.argsort(gang, kind="mergesort")
    first = np.searchsorted(gang[members], np.arange(len(seconds) + 1))
    free = np.zeros(ranks)
    start, stop = np.zeros(len(gang)), np.zeros(len(gang))
    for g in order:
        begin = 0.0
        for m in members[first[g] : first[g + 1]]:
            begin = max(begin, free[rank[m]])
        for m in members[first[g] : first[g + 1]]:
            start[m], stop[m] = begin, begin + seconds[g]
            free[rank[m]] = stop[m]
    return start, stop


def _slots(plan: StepPlan, gangs: Gangs, slot_ns: int) -> tuple[Floats, Floats]:
    """Return start and stop of each micro-batch where all ranks meet in each slot, in each pass."""
    forward, backward = by_slot(plan, gangs)
    ends = np.cumsum(forward + backward + slot_ns)
    return np.concatenate([[0.0], ends[:-1]])[plan.slot], ends[plan.slot]
