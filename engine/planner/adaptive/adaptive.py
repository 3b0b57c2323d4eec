"""The adaptive planner: gives each sequence the ring that makes the step shortest (docs/planner.md).

Four steps: **cost** (`workload.py`: the time of each sequence, and a lower bound of the step time), **candidates**
(`free.py` and `slots.py`: several placements of the sequences on ranks), **choose** the candidate with the shortest
step, and **emit** it as a StepPlan (`build.py`). A pure function of lengths and settings: no clock, no random numbers.
"""

from __future__ import annotations

from dataclasses import replace

from engine.planner import ratios
from engine.planner.adaptive.free import LARGE, best_candidate, free_plan
from engine.planner.adaptive.pipeline import pipeline_plan
from engine.planner.adaptive.slots import price, slot_candidates, slots_plan
from engine.planner.adaptive.workload import lower_bound, workload_of
from engine.planner.baselines.static import static
from engine.planner.plan import rings
from engine.planner.plan.modes import lockstep
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.planner.time.makespan import reduction_end
from engine.units import Ints

_NEAR = 1.02  # a step of at most this many times its lower bound is short enough
_WORTH = 0.999  # offload is used only if it shortens the step by at least 0.1 %
_FEW_PER_RANK = 2  # free mode: with at most this many sequences per rank, the plan of `static` is a candidate too
_FEW = 1024  # lockstep mode: with at most this many sequences, the converted free-mode plan is a candidate too


def adaptive(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan a step of sequences of `lengths` [S], in tokens, in the mode of the settings.

    A capacity that fits only with offload makes micro-batches of short sequences copy for longer than they compute. So
    where the plan offloads and its step is longer than the bound, smaller capacities give other candidates: the one
    that fits without offload, and twice that. Long sequences may be offloaded beyond these, as far as copies hide.
    """
    plans = {"free": _in_free_mode, "lockstep": _in_slots, "pipeline": pipeline_plan}
    plan = ratios.fitted(plans[settings.mode](lengths, settings), settings)
    if settings.full_fits or not plan.offload.any():
        return plan
    plain = settings.costs.most_tokens(settings.device_memory)
    if plain >= settings.capacity:
        return plan
    # A step that is close to its bound cannot become much shorter, so no other capacity is tried.
    exposed = settings.costs.reduction - settings.costs.most_hidden
    end, near = reduction_end(plan, settings), _NEAR * (lower_bound(lengths, settings) + exposed)
    for capacity in (plain, 2 * plain):
        if end > near and capacity < settings.capacity and int(lengths.max()) <= capacity * settings.ranks:
            smaller = replace(settings, capacity=capacity)
            other = ratios.fitted(plans[settings.mode](lengths, smaller), smaller)
            if reduction_end(other, settings) < end:
                plan, end = replace(other, capacity=settings.capacity), reduction_end(other, settings)
    return plan


def peers(settings: PlanSettings) -> Ints:
    """Return the ranks that folded rings may connect to each rank, [P, N]: at most two ranks, or two teams, away."""
    return rings.peers(settings, rings.HOP * settings.costs.rates.team)


def _in_free_mode(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan in free mode: the best of the candidates with and without offload and, for few sequences, of `static`."""
    # Cost. With offload, a sequence fits on a ring of fewer ranks, so the bound may be lower.
    without = workload_of(lengths, settings.without_offload())
    with_offload = workload_of(lengths, settings, without) if settings.offload else without
    promising = with_offload.bound < _WORTH * without.bound
    first, second = (with_offload, without) if promising else (without, with_offload)

    # Candidates. The second workload is tried only if its bound is below the best makespan so far.
    best = best_candidate(first)
    if settings.offload and second.bound < _WORTH * best.makespan and len(lengths) < LARGE:
        other = best_candidate(second)
        if other.makespan < (1.0 if promising else _WORTH) * best.makespan:
            best = other

    # Emit. For few sequences, compare with the plan of `static`.
    plan = free_plan(without, best, settings)
    if len(lengths) <= min(_FEW_PER_RANK * settings.ranks, LARGE):
        other_plan = replace(static(lengths, settings, rings.HOP), planner=plan.planner)
        plan = min(plan, other_plan, key=lambda one: reduction_end(one, settings))
    return plan


def _in_slots(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan in lockstep mode: the candidate with the lowest `price`."""
    workload = workload_of(lengths, settings)
    plans = [slots_plan(workload, slots, settings) for slots in slot_candidates(workload, settings)]
    if len(lengths) <= _FEW:
        plans.append(lockstep(_in_free_mode(lengths, replace(settings, mode="free"))))
    return min(plans, key=lambda plan: price(plan, settings))
