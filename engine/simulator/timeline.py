"""A plan on imagined ranks: when each micro-batch runs, what it waits for, and what that makes of the step.

Times are nanoseconds from the start of the step. The order is that of the real thing (planner/timing.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.planner.durations import gang_times
from engine.planner.plan import Ints, StepPlan
from engine.planner.settings import PlanSettings
from engine.planner.timing import timing


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
    start, stop, makespan = timing(plan, gangs, settings.costs.slot)
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
