"""Convert a plan from free mode to lockstep mode, and from lockstep mode to a pipeline; order it for reductions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.compiled import njit
from engine.planner.plan.emit import Placement, build
from engine.planner.plan.gangs import alone, ends_alone
from engine.planner.plan.order import one_f_one_b
from engine.planner.plan.rows import ascending, grouped
from engine.planner.plan.step_plan import StepPlan
from engine.units import Bools, Ints


def lockstep(plan: StepPlan) -> StepPlan:
    """Convert a free-mode plan to lockstep mode: every rank gets one micro-batch per slot.

    Rings do not change. Gangs are placed in the plan's order, each in the first slot in which all of its ranks are
    idle, so a gang may overtake an earlier one. A rank's micro-batch is idle in slots that it does not use.
    """
    working = np.flatnonzero(np.diff(plan.shard_start))
    gang_start, members = grouped(plan.gang[working], plan.gangs)
    slot_of_gang = _first_idle_slots(gang_start, plan.micro_rank[working[members]], plan.ranks)
    gang = plan.gang[plan.shard_micro[plan.ring_start[:-1]]]  # of each sequence
    placed = Placement(plan.lengths, slot_of_gang[gang], plan.ring_start, plan.ring_ranks)
    slotted = build(plan.planner, "lockstep", plan.ranks, plan.capacity, placed)
    slotted.offload[slotted.shard_micro] = plan.offload[plan.shard_micro]
    return slotted


def pipelined(plan: StepPlan, stages: int) -> StepPlan:
    """Convert a lockstep plan to a 1F1B pipeline of `stages` stages: the slots of a rank become its micro-batches.

    Idle micro-batches after a rank's last work are dropped, so ranks may run different numbers of micro-batches.
    Earlier idle ones stay: so each gang is the i-th micro-batch on all of its ranks, and such a plan cannot deadlock
    (order.py).
    """
    busy = np.diff(plan.shard_start) > 0
    last = np.zeros(plan.ranks, dtype=np.int64)
    np.maximum.at(last, plan.micro_rank[busy], plan.slot[busy])
    kept = plan.slot <= last[plan.micro_rank]
    return replace(
        plan,
        mode="pipeline",
        stages=stages,
        micro_start=np.concatenate([[0], np.cumsum(last + 1)]),
        shard_start=np.concatenate([[0], plan.shard_start[1:][kept]]),
        gang=np.unique(plan.gang[kept], return_inverse=True)[1],
        slot=np.full(int(kept.sum()), -1, dtype=np.int64),
        passes=one_f_one_b(int(last.max()) + 1, stages),
        offload=plan.offload[kept],
    )


def rings_first(plan: StepPlan) -> StepPlan:
    """Order a free-mode plan so that ranks may reduce gradients within their last backward pass.

    A rank that ends with a ring runs the last of its micro-batches without one after it, if it has any:

    ```
    rank 0   [ring A] [1] [ring B]     becomes   [ring A] [ring B] [1]
    rank 1   [ring A] [ring B]         stays, and reduces after its last pass
    ```
    No other rank waits for a micro-batch without a ring. So rings keep their global order, in which it gets a place
    behind all others (Note: [why rings cannot deadlock] in emit.py).
    """
    free = alone(plan.gang)
    order, moved = _last_alone(free, plan.micro_start)
    if len(moved) == 0:
        return plan
    sizes = np.diff(plan.shard_start)[order]
    shard_start = np.concatenate([[0], np.cumsum(sizes)])
    shards = np.arange(len(plan.shard_order)) + np.repeat(plan.shard_start[order] - shard_start[:-1], sizes)
    number = np.arange(plan.gangs)
    number[plan.gang[moved]] += plan.gangs
    gang = ascending(ascending(number))[plan.gang[order]]
    return replace(
        plan,
        shard_start=shard_start,
        shard_order=plan.shard_order[shards],
        gang=gang,
        offload=plan.offload[order],
        overlap=ends_alone(gang, plan.micro_start),
    )


@njit
def _last_alone(free: Bools, micro_start: Ints) -> tuple[Ints, Ints]:
    """Return the order of all micro-batches in which each rank runs its last one of `free` [M] last, [M], and those
    that change their place."""
    order = np.arange(len(free))
    moved = np.empty(len(micro_start) - 1, np.int64)
    count = 0
    for rank in range(len(micro_start) - 1):
        first, last = micro_start[rank], micro_start[rank + 1] - 1
        at = last
        while at >= first and not free[at]:
            at -= 1
        if first <= at < last:
            order[at:last] = order[at + 1 : last + 1]
            order[last] = at
            moved[count] = at
            count += 1
    return order, moved[:count]


@njit
def _first_idle_slots(gang_start: Ints, members: Ints, ranks: int) -> Ints:
    """Return the first slot in which all ranks of a gang are idle, for each gang in turn, [G].

    Gang g runs on ranks members[gang_start[g] : gang_start[g + 1]].
    """
    slots = np.zeros(len(gang_start) - 1, np.int64)
    taken = np.zeros((ranks, 8), np.bool_)
    first_idle = np.zeros(ranks, np.int64)  # by rank: all slots before this one are taken
    for gang in range(len(slots)):
        own = members[gang_start[gang] : gang_start[gang + 1]]
        slot = 0
        for rank in own:
            slot = max(slot, first_idle[rank])
        busy = len(own) > 0
        while busy:
            busy = False
            for rank in own:
                busy |= taken[rank, slot]
            slot += int(busy)
        if slot + 1 >= taken.shape[1]:
            wider = np.zeros((ranks, 2 * taken.shape[1]), np.bool_)
            wider[:, : taken.shape[1]] = taken
            taken = wider
        for rank in own:
            taken[rank, slot] = True
            while taken[rank, first_idle[rank]]:
                first_idle[rank] += 1
        slots[gang] = slot
    return slots
