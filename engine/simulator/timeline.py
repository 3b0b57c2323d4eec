"""A plan on imagined ranks: when each micro-batch runs, in cost units (compute only; links come with calibration)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.cost.model import Costs
from engine.planner.loads import micro_costs
from engine.planner.order import gang_order
from engine.planner.plan import Ints, StepPlan


@dataclass(frozen=True, eq=False)
class Timeline:
    """One row for each micro-batch, idle ones included; times in cost units from the start of the step."""

    rank: Ints  # [M]
    start: Ints  # [M]
    stop: Ints  # [M]
    micro_batch: Ints  # [M] the plan's number of it

    @property
    def makespan(self) -> int:
        """Return when the last rank is done."""
        return int(self.stop.max())


def simulate(plan: StepPlan, costs: Costs) -> Timeline:
    """Return when each micro-batch of a verified plan runs.

    A gang starts when its last member is free, and takes as long as its largest member. In lockstep mode a slot starts
    when all ranks are free.
    """
    duration = micro_costs(plan, costs)
    free = np.zeros(plan.ranks, dtype=np.int64)
    start = np.zeros(plan.micro_batches, dtype=np.int64)
    stop = np.zeros(plan.micro_batches, dtype=np.int64)
    for members in _meetings(plan):
        ranks = plan.micro_rank[members]
        start[members] = free[ranks].max()
        stop[members] = start[members] + duration[members].max()
        free[ranks] = stop[members]
    return Timeline(plan.micro_rank, start, stop, np.arange(plan.micro_batches))


def balance(plan: StepPlan, costs: Costs) -> float:
    """Return the mean over ranks of useful work, at the rate of uncut sequences, over the makespan; 1 is perfect."""
    useful = int(costs.sequence(plan.lengths).sum())
    return useful / (plan.ranks * simulate(plan, costs).makespan)


def _meetings(plan: StepPlan) -> list[Ints]:
    """Return the micro-batches that run together, in an order that every rank agrees with: gangs, or whole slots."""
    if plan.mode == "lockstep":
        return list(np.argsort(plan.slot, kind="stable").reshape(-1, plan.ranks))
    place = np.argsort(gang_order(plan))  # gangs are numbered from 0, so this is the inverse
    by_place = np.argsort(place[plan.gang], kind="stable")
    starts = np.flatnonzero(np.diff(place[plan.gang][by_place])) + 1
    return np.split(by_place, starts)
