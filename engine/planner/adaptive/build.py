"""The emit step of the adaptive planner: builds a StepPlan from groups and rings on neighbouring ranks."""

from __future__ import annotations

import numpy as np

from engine.planner import ratios
from engine.planner.adaptive.workload import Workload
from engine.planner.plan.emit import Placement, build
from engine.planner.plan.rings import all_folded
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.units import Ints


def build_plan(workload: Workload, group: Ints, degree: Ints, first: Ints, settings: PlanSettings) -> StepPlan:
    """Build the plan in which each sequence has a group number, a ring degree and a first rank, [S] each.

    The arrays are in the workload's order; the plan lists sequences in the step's order. A group's number is its place
    in the global order (emit.py). Each ring is folded over `degree` neighbouring ranks and gets the smallest offload
    ratio at which it fits in memory.
    """
    back = np.empty_like(workload.order)
    back[workload.order] = np.arange(len(back))
    lengths = workload.lengths[back]
    ring_start, ring_ranks = all_folded(first[back], degree[back])
    offload = ratios.of_rings(lengths, ring_start, ring_ranks, settings)
    placement = Placement(lengths, group[back], ring_start, ring_ranks, offload)
    return build("adaptive", settings.mode, settings.ranks, settings.capacity, placement, settings.stages)
