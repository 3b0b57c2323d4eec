"""From any planner's plan to slots, in which all ranks meet (ZeRO-2/3 gather and reduce in each of them)."""

from __future__ import annotations

import numpy as np

from engine.planner.emit import build
from engine.planner.plan import Ints, StepPlan


def lockstep(plan: StepPlan) -> StepPlan:
    """Return the same rings in slots: a gang sits in one slot, and every rank has one micro-batch in each slot.

    Idle micro-batches fill the rest. Gangs come in the plan's order, each into the first slot in which all of its
    ranks are free; so a gang may come before one that it followed, and gaps are filled.
    """
    first_shard = plan.ring_start[:-1]
    gang = plan.gang[plan.shard_micro[first_shard]]
    slots = _first_free(plan)[gang]
    slotted = build(
        plan.planner, "lockstep", plan.ranks, plan.capacity, plan.lengths, slots, plan.ring_start, plan.ring_ranks
    )
    slotted.offload[slotted.shard_micro] = plan.offload[plan.shard_micro]
    return slotted


def _first_free(plan: StepPlan) -> Ints:
    """Return the slot of each gang. A rank's taken slots are the bits of an integer; the lowest 0 of all is free."""
    slots = np.zeros(int(plan.gang.max()) + 1, dtype=np.int64)
    taken = [0] * plan.ranks
    working = np.flatnonzero(np.diff(plan.shard_start))
    working = working[np.argsort(plan.gang[working], kind="stable")]
    gangs, starts = np.unique(plan.gang[working], return_index=True)
    for gang, members in zip(gangs.tolist(), np.split(plan.micro_rank[working], starts[1:]), strict=True):
        ranks = members.tolist()
        together = 0
        for rank in ranks:
            together |= taken[rank]
        free = ~together & (together + 1)
        for rank in ranks:
            taken[rank] |= free
        slots[gang] = free.bit_length() - 1
    return slots
