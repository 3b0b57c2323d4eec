"""Slots for lockstep mode, and as the order of a pipeline's micro-batches: the best of a few tries; and their plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.planner.durations import by_slot, gang_times
from engine.planner.free import on_neighbours
from engine.planner.plan import StepPlan
from engine.planner.problem import Problem
from engine.planner.settings import PlanSettings
from engine.planner.slots import Room, Try, fill_slots

_TRIES = tuple((charge, trust, accept) for charge in (0.05, 0.2) for trust in (0.5, 0.9) for accept in (0.0, 0.9, 0.95))
_MANY = 1.3  # more slots than this times the least are taken only where nothing else is left
_SLOT = 0.01  # of a mean slot: a plan of more slots must be so much shorter


def plan_in_slots(problem: Problem, settings: PlanSettings, others: Sequence[StepPlan] = ()) -> StepPlan:
    """Return the plan whose slots together take the least, of ours and `others`, which are in slots too."""
    plans = [_filled(problem, replace(settings, mode="lockstep", stages=1)), *others]
    best = min(plans, key=lambda plan: total_time(plan, settings))
    return replace(best, planner="adaptive")


def total_time(plan: StepPlan, settings: PlanSettings) -> float:
    """Return the time of all slots of a plan, ns: in each of them and in each pass the longest gang's."""
    gangs = gang_times(plan, settings.costs, settings.cluster)
    forward, backward = by_slot(plan, gangs)
    return float(forward.sum() + backward.sum()) + len(forward) * settings.costs.slot


def _filled(problem: Problem, settings: PlanSettings) -> StepPlan:
    lengths, ranks, costs = problem.lengths, problem.ranks, settings.costs
    holds = int(ranks.holds.min())
    room = Room(holds, np.minimum(ranks.most.min(), holds * problem.gain), ranks.node, ranks.share, settings.ranks)
    fixed = costs.rates.micro + costs.slot
    least = -(-int(lengths.sum()) // (holds * settings.ranks))
    mean = float(problem.times.sum()) / settings.ranks / least
    best, shortest = None, np.inf
    for charge, trust, accept in _TRIES:
        found = (np.ones(len(lengths), dtype=np.int64), np.zeros_like(lengths), np.zeros_like(lengths))
        taken = fill_slots(problem.rates, lengths, room, Try(max(fixed, charge * mean), trust, accept), *found)
        slots = int(found[2].max()) + 1
        taken += slots * (fixed + _SLOT * mean) + max(0.0, slots - _MANY * least) * mean
        if taken < shortest:
            best, shortest = found, taken
    assert best is not None
    degree, first, slot = best
    return on_neighbours(problem, slot, degree, first, settings)
