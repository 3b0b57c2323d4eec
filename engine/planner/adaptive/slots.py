"""Candidates for lockstep mode and for pipelines, whose micro-batches run in the order of the slots."""

from __future__ import annotations

from dataclasses import replace
from math import fsum
from typing import NamedTuple

import numpy as np

from engine.planner.adaptive.build import build_plan, uncut
from engine.planner.adaptive.fill import Slot, fill_slots
from engine.planner.adaptive.workload import Workload
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.planner.time.durations import by_slot, gang_times
from engine.units import Floats, Ints

# Least fixed cost of a slot while slots are filled, as a fraction of a mean slot's time; keeps the number of slots low.
_LEAST_CHARGE = 0.1
_FEWER_SLOTS = 8.0  # factor on that cost for a candidate of fewer slots. Gain: 0.55 % on average, 18 % at most
_LARGE = 2**16  # from this many sequences on, only one candidate is built
_MANY = 32  # a pipeline with more slots for each stage is not searched: 1F1B order is about as good
_TOPS = (1.0, 0.5, 0.25, 0.125, 0.0625)  # for a pipeline: longest slots that are tried, as fractions of the lower bound

# Prices in case the cost model leaves out slots or transfers: if these were free, every sequence would be split over
# all ranks, and every length would get its own slot.
_HOP = 0.01  # least price of sending a token to another rank, as a fraction of its time in linear layers
_SLOT = 0.01  # least price of a slot, as a fraction of a mean slot's time
_FEW_SLOTS, _MANY_SLOTS = 3, 1.3  # slots beyond both 3 and 1.3 times the least number cost a mean slot's time each


class Slots(NamedTuple):
    """A slot, and a ring of neighbouring ranks, for each sequence in the workload's order, [S] each."""

    number: Ints
    degree: Ints
    first: Ints


def slot_candidates(workload: Workload, settings: PlanSettings) -> list[Slots]:
    """Fill slots in several ways, with offload and, if that differs, without.

    Candidates also differ in the fixed cost of a slot that they assume or, for a pipeline, in the longest slot allowed.
    From _LARGE sequences on, there is one candidate only. Of a pipeline of so many sequences, or whose stages wait
    little, there is one with offload and one without.
    """
    lengths = workload.lengths
    holds = np.full(len(lengths), float(workload.ranks.holds.min()))
    with_offload = np.minimum(workload.ranks.most.min(), holds * workload.gain)
    if settings.stages > 1:
        # All stages wait for the longest micro-batch, so shorter slots are tried, with wider rings for long sequences.
        few = len(holds) >= _LARGE or waits_little(lengths, settings)
        tops = [top * workload.bound for top in (_TOPS[:1] if few else _TOPS)]
        mosts = (with_offload, holds) if (with_offload > holds).any() else (holds,)
        return [_filled(workload, settings, most, top=top) for most in mosts for top in tops]
    found = [_filled(workload, settings, with_offload)]
    if len(holds) < _LARGE:
        found.append(_filled(workload, settings, with_offload, charge=_FEWER_SLOTS))
        if (with_offload > holds).any():
            found.append(_filled(workload, settings, holds))  # gain: 0.16 % on average, 7 % at most
    return found


def waits_little(lengths: Ints, settings: PlanSettings) -> bool:
    """Whether a pipeline needs so many slots that its stages wait for a small part of a step, whatever the slots."""
    return _least_slots(lengths, settings) > _MANY * settings.stages


def slots_plan(workload: Workload, slots: Slots, settings: PlanSettings) -> StepPlan:
    """Build the lockstep plan of a candidate."""
    whole = uncut(workload, slots.number)
    return build_plan(workload, whole, slots.degree, slots.first, replace(settings, mode="lockstep", stages=1))


def _filled(
    workload: Workload, settings: PlanSettings, most: Floats, charge: float = 1.0, top: float = np.inf
) -> Slots:
    """Fill the slots of one candidate.

    A rank of a ring gets at most `most` [S] tokens of a sequence. `charge` is a factor on the fixed cost of a slot. No
    slot should take longer than `top` ns.
    """
    lengths, ranks, costs = workload.lengths, workload.ranks, settings.costs
    mean = workload.work / settings.ranks / _least_slots(lengths, settings)
    charge *= max(costs.rates.micro + costs.slot, _LEAST_CHARGE * mean)
    power = int(settings.cluster.speed.sum()) / 100
    slot = Slot(settings.least_capacity, ranks.holds, ranks.slow, power, ranks.node, settings.ranks, charge, top)
    degree, first, number = np.ones(len(lengths), dtype=np.int64), np.zeros_like(lengths), np.zeros_like(lengths)
    fill_slots(workload.rates, lengths, most, slot, degree, first, number)
    return Slots(number, degree, first)


def slots_time(plan: StepPlan, settings: PlanSettings) -> float:
    """Time of all slots of a lockstep plan, in ns: each pass of a slot takes as long as its longest gang.

    For a pipeline, the sum over all stages, plus the longest slot once for each further stage (the pipeline bubbles).
    """
    forward, backward = by_slot(plan, gang_times(plan, settings.costs, settings.cluster), settings.costs)
    waits = (settings.stages - 1) * float((forward + backward).max())
    return fsum(forward) + fsum(backward) + waits + len(forward) * settings.costs.slot


def price(plan: StepPlan, settings: PlanSettings) -> float:
    """Cost by which candidates are compared, in ns: `slots_time`, plus least prices for hops and slots.

    Slots have this price only if the cost model has no fixed cost for them, and not in a pipeline.
    """
    rates, slots = settings.costs.rates, int(plan.slot.max()) + 1
    hop = max(0.0, _HOP * (rates.token_f + rates.token_b) - rates.kv - rates.dkv)
    extra = hop * float((plan.lengths * (plan.degrees - 1)).sum()) / plan.ranks
    if rates.micro + settings.costs.slot == 0 and settings.stages == 1:
        least = _least_slots(plan.lengths, settings)
        mean = float(settings.costs.sequence(plan.lengths).sum()) / plan.ranks / least
        extra += (slots * _SLOT + max(0.0, slots - max(_FEW_SLOTS, _MANY_SLOTS * least))) * mean
    return slots_time(plan, settings) + extra


def _least_slots(lengths: Ints, settings: PlanSettings) -> int:
    """Fewest slots in which all tokens fit."""
    return -(-int(lengths.sum()) // (settings.least_capacity * settings.ranks))
