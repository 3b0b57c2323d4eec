"""Our planner: each sequence on the ring that shortens the step, at true cost. docs/planner.md explains it.

1. `problem.py`: the least time T in which the step can be done, and so how long a ring may take.
2. `free.py`: rings on a skyline without gaps, whole sequences on top; the best of a few tries, and with offload of as
   many again. Steps of a few sequences are searched as well (`small.py`).
3. `slotted.py`: where ranks meet in each slot, slots that are even.

A pure function of lengths and settings: no clock, no random numbers but a fixed row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from engine.planner.balanced import balanced
from engine.planner.free import best_candidate, plan_of
from engine.planner.lockstep import lockstep
from engine.planner.naive import naive
from engine.planner.plan import Ints, StepPlan
from engine.planner.problem import problem_of, without_offload
from engine.planner.settings import PlanSettings
from engine.planner.slotted import plan_in_slots
from engine.planner.small import is_small, searched
from engine.planner.staged import staged
from engine.planner.static import degree, static
from engine.planner.timing import makespan

Planner = Callable[[Ints, PlanSettings], StepPlan]
_A_RANK = 2  # sequences a rank up to which a step is a matter of luck, and others' plans are tried
_LARGE = 4096  # sequences from which only the more promising of both is tried
_FEW = 2**10  # sequences up to which other planners' plans are tried in slots: a slot of few is a matter of luck
_FEW_SHARDS = 2**15  # and shards of the static one, which comes nearest
_WORTH = 0.999  # offload is taken only where it shortens the step


def adaptive(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan a step in the settings' mode."""
    if settings.mode == "free":
        plan = _free(lengths, settings)
        if len(lengths) > min(_A_RANK * settings.ranks, _LARGE):
            return plan
        return _shortest([plan, *(planner(lengths, settings) for planner in (balanced, static))], settings)
    if settings.mode == "pipeline":
        return staged(plan_in_slots(problem_of(lengths, settings), settings), settings.stages)
    free = replace(settings, mode="free")
    others = [lockstep(planner(lengths, free)) for planner in _others(lengths, settings)]
    return plan_in_slots(problem_of(lengths, settings), settings, others)


def _free(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan in free mode: with offload or without, whichever promises more first, the other if it could be better."""
    wider = problem_of(lengths, settings)
    plain = without_offload(wider, settings) if settings.offload else wider
    first, second = (wider, plain) if wider.bound < _WORTH * plain.bound else (plain, wider)
    best = best_candidate(first)
    if second.bound < _WORTH * best.makespan and len(lengths) < _LARGE:
        other = best_candidate(second)
        if other.makespan < (_WORTH if second is wider else 1.0) * best.makespan:
            best = other
    found = searched(plain, best, settings) if is_small(plain, settings) else None
    return plan_of(plain, best, settings) if found is None else found


def _shortest(plans: Sequence[StepPlan], settings: PlanSettings) -> StepPlan:
    """Return the plan that takes the least time, the first of equal ones."""
    best = min(plans, key=lambda plan: makespan(plan, settings))
    return replace(best, planner="adaptive")


def _others(lengths: Ints, settings: PlanSettings) -> Iterator[Planner]:
    """Yield the planners whose plans may be better in slots than ours."""
    if len(lengths) <= _FEW:
        yield from (_free, naive, balanced)
    if len(lengths) * degree(settings) <= _FEW_SHARDS:
        yield static
