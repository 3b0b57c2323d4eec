"""From any planner's plan to slots, in which all ranks meet (ZeRO-2/3 gather and reduce in each of them)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.compiled import kernel
from engine.planner.emit import Placement, build
from engine.planner.plan import Ints, StepPlan
from engine.planner.rows import grouped


def lockstep(plan: StepPlan) -> StepPlan:
    """Return the same rings in slots: a gang sits in one slot, and every rank has one micro-batch in each slot.

    Idle micro-batches fill the rest. Gangs come in the plan's order, each into the first slot in which all of its
    ranks are free; so a gang may come before one that it followed, and gaps are filled.
    """
    first_shard = plan.ring_start[:-1]
    gang = plan.gang[plan.shard_micro[first_shard]]
    slots = _first_free(plan)[gang]
    placed = Placement(plan.lengths, slots, plan.ring_start, plan.ring_ranks)
    slotted = build(plan.planner, "lockstep", plan.ranks, plan.capacity, placed)
    slotted.offload[slotted.shard_micro] = plan.offload[plan.shard_micro]
    return slotted


def _first_free(plan: StepPlan) -> Ints:
    """Return the slot of each gang, [G]; idle ones have none and stand at 0."""
    working = np.flatnonzero(np.diff(plan.shard_start))
    start, items = grouped(plan.gang[working], int(plan.gang.max()) + 1)
    return _slots(start, plan.micro_rank[working[items]], plan.ranks)


@kernel
def _slots(start: Ints, members: Ints, ranks: int) -> Ints:
    """Return the first slot in which all ranks of a gang, members[start[g]] .. members[start[g + 1] - 1], are free."""
    slots = np.zeros(len(start) - 1, np.int64)
    taken = np.zeros((ranks, 8), np.bool_)
    lowest = np.zeros(ranks, np.int64)  # by rank: all slots before it are taken
    for gang in range(len(slots)):
        own = members[start[gang] : start[gang + 1]]
        slot = 0
        for rank in own:
            slot = max(slot, lowest[rank])
        while _busy(taken, own, slot):
            slot += 1
        if slot + 1 >= taken.shape[1]:
            taken = _wider(taken)
        for rank in own:
            taken[rank, slot] = True
            while taken[rank, lowest[rank]]:
                lowest[rank] += 1
        slots[gang] = slot
    return slots


@kernel
def _busy(taken: NDArray[np.bool_], ranks: Ints, slot: int) -> bool:
    busy = False
    for rank in ranks:
        busy |= taken[rank, slot]
    return busy


@kernel
def _wider(taken: NDArray[np.bool_]) -> NDArray[np.bool_]:
    ranks, slots = taken.shape
    wider = np.zeros((ranks, 2 * slots), np.bool_)
    for rank in range(ranks):
        for slot in range(slots):
            wider[rank, slot] = taken[rank, slot]
    return wider
