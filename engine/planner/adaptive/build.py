"""The emit step of the adaptive planner: builds a StepPlan from groups and rings on neighbouring ranks.

Letters: S sequences, N slices of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.planner import ratios
from engine.planner.adaptive.workload import Workload
from engine.planner.plan.emit import Placement, build
from engine.planner.plan.rings import all_folded
from engine.planner.plan.rows import ascending
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.units import Ints


class Cut(NamedTuple):
    """The slices of sequences, which have the workload's order."""

    sequence: Ints  # [N] ascending
    lengths: Ints  # [N] tokens
    number: Ints  # [N] its group
    before: Ints | None = None  # [N] tokens of the earlier slices of its sequence; none if no sequence is cut
    team: Ints | None = None  # [N] parts of its ring that form a team; 1 if none


def uncut(workload: Workload, number: Ints) -> Cut:
    """Return every sequence as one slice, in group number [S]."""
    return Cut(np.arange(len(number)), workload.lengths, number)


def build_plan(workload: Workload, cut: Cut, degree: Ints, first: Ints, settings: PlanSettings) -> StepPlan:
    """Build the plan in which each sequence has a ring degree and a first rank, [S] each, and each slice a group.

    The arrays are in the workload's order; the plan lists sequences in the step's order. A group's number is its place
    in the global order (emit.py). Each ring is folded over `degree` neighbouring ranks and gets the smallest offload
    ratio at which it fits in memory.
    """
    # Back to the order of the step. Without slices that is the inverse of a permutation, which needs no sorting.
    if cut.before is None:
        sequence = back = np.empty_like(workload.order)
        back[workload.order] = cut.sequence
    else:
        back = ascending(workload.order[cut.sequence])
        sequence = cut.sequence[back]
    lengths = cut.lengths[back]
    ring_start, ring_ranks = all_folded(first[sequence], degree[sequence])
    offload = ratios.of_rings(lengths, ring_start, ring_ranks, settings)
    before, team = (None if of is None else of[back] for of in (cut.before, cut.team))
    placement = Placement(lengths, cut.number[back], ring_start, ring_ranks, offload, before, team)
    return build("adaptive", settings.mode, settings.ranks, settings.capacity, placement, settings.stages)
