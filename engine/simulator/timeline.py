"""Simulate a plan: when each micro-batch runs, and how much of the step is compute and exposed communication.

The order of execution is the real one (planner/time/makespan.py). Times are nanoseconds from the start of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.cost.model import Costs
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.planner.time.durations import gang_times
from engine.planner.time.makespan import timing
from engine.units import Ints


@dataclass(frozen=True, eq=False)
class Timeline:
    """A simulated step. Arrays have one entry per micro-batch, idle ones included.

    In a pipeline, start and stop are those on the first stage.
    """

    rank: Ints  # [M]
    start: Ints  # [M] ns
    stop: Ints  # [M] ns
    micro_batch: Ints  # [M] its number in the plan
    makespan: int  # ns until the last rank has finished its micro-batches
    compute: float  # ns of computing, mean over ranks and their stages
    exposed: float  # ns of only waiting for transfers, mean over the same
    hidden: float  # ns of the reduction of gradients behind last backward passes

    def step_ns(self, costs: Costs) -> float:
        """The time of the whole step, with the rest of the reduction and the update."""
        return self.makespan - self.hidden + costs.step


def simulate(plan: StepPlan, settings: PlanSettings) -> Timeline:
    """Compute when each micro-batch of a verified plan runs on modelled ranks."""
    gangs = gang_times(plan, settings.costs, settings.cluster)
    start, stop, makespan, hidden = timing(plan, gangs, settings.costs)
    devices = plan.ranks * plan.stages  # each stage computes its part of the layers
    exposed = float(gangs.exposed[plan.gang].sum()) / devices
    compute = float(gangs.compute.sum()) / devices
    whole_start, whole_stop = (np.rint(times).astype(np.int64) for times in (start, stop))
    micro = np.arange(plan.micro_batches)
    return Timeline(plan.micro_rank, whole_start, whole_stop, micro, round(makespan), compute, exposed, hidden)


def balance(plan: StepPlan, settings: PlanSettings) -> float:
    """Balance of a plan: the mean useful work of a rank divided by the makespan; 1 is perfect."""
    return useful(plan.sequence_lengths, settings) / simulate(plan, settings).makespan


def useful(lengths: Ints, settings: PlanSettings) -> float:
    """Return the mean useful work of a rank, in ns.

    This is the time of all sequences if unsplit, divided by the total speed of all ranks (1 is full speed) and by the
    number of stages.
    """
    work = int(settings.costs.sequence(lengths).sum())
    return work / (int(settings.cluster.speed.sum()) / 100) / settings.stages
