from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.make import plan_step
from engine.planner.plan.emit import emit
from engine.planner.plan.modes import lockstep
from engine.planner.plan.step_plan import StepPlan
from engine.planner.planners import PLANNERS
from engine.planner.proof.verify import verify
from tests.planner.samples import ints, lengths, settings


@given(st.sampled_from(sorted(PLANNERS)), st.integers(1, 8), st.data())
def test_rings_and_micro_batches_stay_the_same(planner: str, ranks: int, data: st.DataObject) -> None:
    plan = plan_step(ints(*data.draw(lengths(ranks * 16))), settings(planner, ranks))
    slotted = lockstep(plan)
    verify(slotted, settings(planner, ranks, mode="lockstep"))
    assert np.array_equal(slotted.ring_start, plan.ring_start) and np.array_equal(slotted.ring_ranks, plan.ring_ranks)
    for rank in range(ranks):
        before, after = ({micro.shards for micro in p.of_rank(rank) if micro.shards} for p in (plan, slotted))
        assert before == after
        assert [micro.slot for micro in slotted.of_rank(rank)] == list(range(len(list(slotted.of_rank(rank)))))


def by_bits(plan: StepPlan) -> list[int]:
    """Return the slot of each sequence. A rank's taken slots are bits of a number; a gang takes the lowest zero."""
    taken = [0] * plan.ranks
    slot_of = {}
    for gang in sorted(set(plan.gang.tolist())):
        ranks = plan.micro_rank[plan.gang == gang].tolist()
        together = 0
        for rank in ranks:
            together |= taken[rank]
        free = ~together & (together + 1)
        for rank in ranks:
            taken[rank] |= free
        slot_of[gang] = free.bit_length() - 1
    return [slot_of[gang] for gang in plan.gang[plan.shard_micro[plan.ring_start[:-1]]].tolist()]


@given(st.integers(1, 6), st.integers(1, 60), st.randoms(use_true_random=False))
def test_slots_are_those_of_a_search_over_bits(ranks: int, count: int, random: Random) -> None:
    rings = [random.sample(range(ranks), random.choice([1, 1, random.randint(1, ranks)])) for _ in range(count)]
    groups = [[(sequence, ring)] for sequence, ring in enumerate(rings)]
    plan = emit("by hand", "free", ranks, 16, np.full(count, 3), groups)
    slotted = lockstep(plan)
    slots = slotted.slot[slotted.shard_micro[slotted.ring_start[:-1]]].tolist()
    assert slots == by_bits(plan)
