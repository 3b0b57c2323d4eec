"""Slots for lockstep mode, and as the order of a pipeline's micro-batches: the best of a few tries; and their plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.planner.bound import Floats
from engine.planner.durations import by_slot, gang_times
from engine.planner.free import on_neighbours
from engine.planner.plan import Ints, StepPlan
from engine.planner.problem import Problem
from engine.planner.settings import PlanSettings
from engine.planner.slots import Room, fill_slots

_CHARGE = 0.1  # of a mean slot: what a slot is charged at least while it is filled, or slots would multiply
_MORE = 8.0  # times this charge makes fewer slots, which other tries do not find
_LARGE = 2**16  # sequences from which one try must do
# Costs that leave out slots and transfers would cut everything over all ranks, and make a slot of each length. Then
_FEW, _MANY = (
    3,
    1.3,
)  # more slots than so many, and than so many times the least, are taken only if nothing else is left
_SLOT = 0.01  # of a mean slot: a plan of more slots must be so much shorter
_HOP = 0.01  # of a token's linear layers: what a token that moves to another rank costs


def plan_in_slots(problem: Problem, settings: PlanSettings, others: Sequence[StepPlan] = ()) -> StepPlan:
    """Return the plan whose slots together take the least, of ours and `others`, which are in slots too."""
    lockstep = replace(settings, mode="lockstep", stages=1)
    plans = [*(_filled(problem, most, more, lockstep) for most, more in _tries(problem)), *others]
    best = min(plans, key=lambda plan: total_time(plan, settings) + _left_out(plan, settings))
    return replace(best, planner="adaptive")


def total_time(plan: StepPlan, settings: PlanSettings) -> float:
    """Return the time of all slots of a plan, ns: in each of them and in each pass the longest gang's.

    In a pipeline all stages together, which wait for the first slots and for the last.
    """
    gangs = gang_times(plan, settings.costs, settings.cluster)
    forward, backward = by_slot(plan, gangs)
    waits = (settings.stages - 1) * float((forward + backward).max())
    return float(forward.sum() + backward.sum()) + waits + len(forward) * settings.costs.slot


def _left_out(plan: StepPlan, settings: PlanSettings) -> float:
    """Return what slots and hops shall cost, ns, as far as the model leaves it out."""
    rates, slots = settings.costs.rates, int(plan.slot.max()) + 1
    token = rates.token_f + rates.token_b
    hop = max(0.0, _HOP * token - rates.kv - rates.dkv)
    price = hop * float((plan.lengths * (plan.degrees - 1)).sum()) / plan.ranks
    if rates.micro + settings.costs.slot == 0 and settings.stages == 1:
        least = _least(plan.lengths, settings)
        mean = float(settings.costs.sequence(plan.lengths).sum()) / plan.ranks / least
        price += (slots * _SLOT + max(0.0, slots - max(_FEW, _MANY * least))) * mean
    return price


def _least(lengths: Ints, settings: PlanSettings) -> int:
    """Return the least number of slots that hold all tokens."""
    return -(-int(lengths.sum()) // (int(settings.capacities.min()) * settings.ranks))


def _tries(problem: Problem) -> list[tuple[Floats, float]]:
    """Return how many tokens of each sequence, [S], a rank of a ring may hold, and times the charge of a slot."""
    holds = np.full(len(problem.lengths), float(problem.ranks.holds.min()))
    with_offload = np.minimum(problem.ranks.most.min(), holds * problem.gain)
    if len(holds) >= _LARGE:
        return [(with_offload, 1.0)]
    tries = [(with_offload, 1.0), (with_offload, _MORE)]
    return tries if (with_offload <= holds).all() else [*tries, (holds, 1.0)]


def _filled(problem: Problem, most: Floats, more: float, settings: PlanSettings) -> StepPlan:
    lengths, ranks, costs = problem.lengths, problem.ranks, settings.costs
    mean = float(problem.times.sum()) / settings.ranks / _least(lengths, settings)
    charge = more * max(costs.rates.micro + costs.slot, _CHARGE * mean)
    degree, first, slot = np.ones(len(lengths), dtype=np.int64), np.zeros_like(lengths), np.zeros_like(lengths)
    room = Room(int(ranks.holds.min()), ranks.node, settings.ranks, charge)
    fill_slots(problem.rates, lengths, most, room, degree, first, slot)
    return on_neighbours(problem, slot, degree, first, settings)
