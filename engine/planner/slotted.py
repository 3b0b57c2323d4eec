"""Slots for lockstep mode, and as the order of a pipeline's micro-batches: the best of a few tries; and their plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import fsum
from typing import NamedTuple

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
_TOPS = (1.0, 0.5, 0.25, 0.125, 0.0625)  # of the step: the longest micro-batches that are tried for a pipeline
# Costs that leave out slots and transfers would cut everything over all ranks, and make a slot of each length. Then
# more slots than so many, and than so many times the least, are taken only if nothing else is left.
_FEW, _MANY = 3, 1.3
_SLOT = 0.01  # of a mean slot: a plan of more slots must be so much shorter
_HOP = 0.01  # of a token's linear layers: what a token that moves to another rank costs


class _Try(NamedTuple):
    """How slots are filled: tokens of each sequence, [S], that a rank of a ring may hold; times a slot's charge; ns."""

    most: Floats
    charge: float
    top: float = np.inf  # no slot takes longer, if its longest sequence can be done in less


def plan_in_slots(problem: Problem, settings: PlanSettings, others: Sequence[StepPlan] = ()) -> StepPlan:
    """Return the plan whose slots together take the least, of ours and `others`, which are in slots too."""
    lockstep = replace(settings, mode="lockstep", stages=1)
    plans = [*(_filled(problem, one, lockstep) for one in _tries(problem, settings.stages)), *others]
    best = min(plans, key=lambda plan: total_time(plan, settings) + _left_out(plan, settings))
    return replace(best, planner="adaptive")


def total_time(plan: StepPlan, settings: PlanSettings) -> float:
    """Return the time of all slots of a plan, ns: in each of them and in each pass the longest gang's.

    In a pipeline all stages together, which wait for the first slots and for the last.
    """
    gangs = gang_times(plan, settings.costs, settings.cluster)
    forward, backward = by_slot(plan, gangs)
    waits = (settings.stages - 1) * float((forward + backward).max())
    return fsum(forward) + fsum(backward) + waits + len(forward) * settings.costs.slot


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
    return -(-int(lengths.sum()) // (settings.least_capacity * settings.ranks))


def _tries(problem: Problem, stages: int) -> list[_Try]:
    """Return what to try. A pipeline waits for its longest micro-batch: there long ones are worth more ranks."""
    holds = np.full(len(problem.lengths), float(problem.ranks.holds.min()))
    with_offload = np.minimum(problem.ranks.most.min(), holds * problem.gain)
    if stages > 1:
        return [_Try(most, 1.0, top * problem.bound) for most in (with_offload, holds) for top in _TOPS]
    if len(holds) >= _LARGE:
        return [_Try(with_offload, 1.0)]
    tries = [_Try(with_offload, 1.0), _Try(with_offload, _MORE)]
    return tries if (with_offload <= holds).all() else [*tries, _Try(holds, 1.0)]


def _filled(problem: Problem, one: _Try, settings: PlanSettings) -> StepPlan:
    lengths, ranks, costs = problem.lengths, problem.ranks, settings.costs
    mean = problem.work() / settings.ranks / _least(lengths, settings)
    charge = one.charge * max(costs.rates.micro + costs.slot, _CHARGE * mean)
    degree, first, slot = np.ones(len(lengths), dtype=np.int64), np.zeros_like(lengths), np.zeros_like(lengths)
    room = Room(int(ranks.holds.min()), ranks.node, settings.ranks, charge, one.top)
    fill_slots(problem.rates, lengths, one.most, room, degree, first, slot)
    return on_neighbours(problem, slot, degree, first, settings)
