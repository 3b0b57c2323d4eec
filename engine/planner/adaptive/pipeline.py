"""Plans for a pipeline: slots that are cut into slices, and an order of their passes.

Slots are filled as in lockstep mode (slots.py), and cut into slots of several lengths (slices.py). For the promising
ones the order of passes is searched (interleave.py). A plan without slices in 1F1B order is a candidate too: it needs
the least memory.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from engine.planner import ratios
from engine.planner.adaptive.build import build_plan
from engine.planner.adaptive.interleave import Jobs, interleave
from engine.planner.adaptive.slices import cut_slots
from engine.planner.adaptive.slots import Slots, price, slot_candidates, slots_plan, waits_little
from engine.planner.adaptive.workload import Workload, workload_of
from engine.planner.plan import loads
from engine.planner.plan.modes import pipelined
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.planner.time.durations import by_slot, gang_times
from engine.planner.time.makespan import makespan
from engine.units import Ints

# Lengths of slots that are tried, as fractions of the lower bound.
TARGETS: tuple[float, ...] = (np.inf, 0.25, 0.125, 0.09, 0.0625, 0.045, 0.03125)
# The last slots, as many as stages, have the shortest sequences. If they are cut into shorter slots than the others,
# stages wait less while the pipeline fills and drains. Lengths that are tried, as fractions of the others.
_SHORT_ENDS = (1.0, 0.25)
_SEARCHED = 20  # candidates whose order is searched. With 5 steps are .5 % longer on average, with 60 not shorter


def pipeline_plan(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan a step of sequences of `lengths` [S] as a pipeline: the candidate with the shortest step."""
    workload = workload_of(lengths, settings)
    candidates = slot_candidates(workload, settings)
    best = uncut_pipeline(workload, candidates, settings)
    if waits_little(lengths, settings):
        return best
    # Otherwise, if no candidate fits, `plan_step` plans again without micro-batches that exceed the capacity.
    end = makespan(best, settings) if _allowed(best, settings) else np.inf
    # Each candidate is cut into slots of several lengths. Simple orders (`sweeps` 0) show which cuts are promising,
    # because a search for the best order takes long.
    found, seen = [], set[bytes]()
    for slots in candidates:
        for target, part in product(TARGETS, _SHORT_ENDS):
            targets = np.full(int(slots.number.max()) + 1, target * workload.bound)
            targets[-settings.stages :] *= part
            cut = cut_slots(workload, slots, settings, targets)
            same = cut.number.tobytes() + slots.degree.tobytes() + slots.first.tobytes()
            if same in seen:
                continue
            seen.add(same)
            plan = build_plan(workload, cut, slots.degree, slots.first, replace(settings, mode="lockstep", stages=1))
            jobs, most = jobs_of(plan, settings)
            found.append((interleave(jobs, most, sweeps=0).makespan, plan, jobs, most))
    # The order is searched for the promising ones. Jobs are a simpler model of the step, so the makespan of the plan
    # itself decides.
    for _, plan, jobs, most in sorted(found, key=lambda one: one[0])[:_SEARCHED]:
        order = interleave(jobs, most)
        if order.makespan < end:
            ordered = ratios.fitted(replace(pipelined(plan, settings.stages), passes=order.passes), settings)
            ends = makespan(ordered, settings)
            if ends < end and _allowed(ordered, settings):
                best, end = ordered, ends
    return best


def uncut_pipeline(workload: Workload, candidates: list[Slots], settings: PlanSettings) -> StepPlan:
    """Build the best plan without slices, in 1F1B order."""
    plans = (slots_plan(workload, slots, settings) for slots in candidates)
    best = min(plans, key=lambda plan: price(plan, settings))
    return ratios.fitted(pipelined(best, settings.stages), settings)


def _allowed(plan: StepPlan, settings: PlanSettings) -> bool:
    """Whether no rank has too many peers, and all micro-batches in flight fit on their devices and hosts."""
    return int(loads.peers(plan).max()) <= settings.max_peers and ratios.fits_in_flight(plan, settings)


def jobs_of(plan: StepPlan, settings: PlanSettings) -> tuple[Jobs, Ints]:
    """Return the slots of a lockstep plan as jobs of a pipeline, and how many tokens each stage may hold at once, [n].

    The memory of the smallest device counts, without what the largest micro-batch needs besides its saved activations.
    """
    costs, slots = settings.costs, int(plan.slot.max()) + 1
    forward, backward = by_slot(plan, gang_times(plan, costs, settings.cluster), costs)
    tokens, buffers = loads.micro_loads(plan)
    held, (gradients, _) = loads.held_tokens(plan, costs), loads.gradient_tokens(plan, costs)
    in_slot = np.zeros((len(held), slots), dtype=np.int64)
    for stage, of_stage in enumerate(held):
        np.maximum.at(in_slot[stage], plan.slot, of_stage)
    linked = np.zeros(slots, dtype=np.bool_)
    linked[plan.slot[plan.shard_micro[plan.before[plan.shard_slice] > 0]]] = True
    largest, most = int(tokens.max()), np.zeros(settings.stages, dtype=np.int64)
    for number, one in enumerate(costs.stages):
        besides = int(one.working(largest)) + one.ring_bytes * int(buffers.max())
        if plan.offload.any():  # two layers are copied back
            besides += one.token_bytes * 2 * largest // (one.layers * one.in_flight)
        saved = int(settings.cluster.memory.min()) - one.fixed_bytes - besides
        # Room for the gradients of K,V of one sequence. An order in which two have them at once may be refused later.
        held_at_once = max(0, saved) * one.in_flight // max(1, one.token_bytes) - int(gradients[number].max())
        most[number] = max(0, held_at_once)
    shares = costs.shares[:, None]
    return Jobs(forward * shares, backward * shares, in_slot, linked), most
