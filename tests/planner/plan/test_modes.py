from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.make import plan_step
from engine.planner.plan.emit import emit
from engine.planner.plan.modes import lockstep, rings_first
from engine.planner.plan.step_plan import StepPlan
from engine.planner.planners import PLANNERS
from engine.planner.proof.verify import verify
from engine.units import PPM
from tests.planner.samples import by_hand, ints, lengths, settings


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


def test_a_rank_that_ends_with_a_ring_runs_its_last_micro_batch_without_one_after_it() -> None:
    """Rank 0 has two, rank 1 none, rank 2 ends with one, and rank 3 is idle."""
    rings = [(0, 1), (0,), (0,), (1, 0), (2, 1), (2,)]
    plan = by_hand([9, 1, 2, 9, 9, 4], rings, [[[0], [1], [2], [3]], [[0], [3], [4]], [[4], [5]], [[]]])
    plan.offload[:] = range(plan.micro_batches)
    ordered = rings_first(plan)
    verify(ordered, replace(settings(ranks=4, capacity=16), offload=PPM, host_memory=10**6))
    sequences = [[[shard.sequence for shard in micro.shards] for micro in ordered.of_rank(r)] for r in range(4)]
    assert sequences == [[[0], [1], [3], [2]], [[0], [3], [4]], [[4], [5]], [[]]]
    assert ordered.overlap.tolist() == [1, 0, 1, 1]
    assert ordered.offload.tolist() == [0, 1, 3, 2, *range(4, plan.micro_batches)]
    assert rings_first(ordered) is ordered


@given(st.integers(1, 5), st.integers(1, 30), st.randoms(use_true_random=False))
def test_ordering_for_reductions_changes_nothing_else(ranks: int, count: int, random: Random) -> None:
    rings = [random.sample(range(ranks), random.choice([1, 1, random.randint(1, ranks)])) for _ in range(count)]
    groups = [[(sequence, ring)] for sequence, ring in enumerate(rings)]
    plan = emit("by hand", "free", ranks, 16, np.full(count, 3), groups)
    ordered = rings_first(plan)
    verify(ordered, settings(ranks=ranks, max_peers=ranks, capacity=16))
    for rank in range(ranks):
        before, after = ([micro.shards for micro in one.of_rank(rank)] for one in (plan, ordered))
        assert sorted(before, key=str) == sorted(after, key=str)
        in_rings = [[row for row in rows if any(shard.degree > 1 for shard in row)] for rows in (before, after)]
        assert in_rings[0] == in_rings[1], "rings keep their order"
        assert ordered.overlaps(rank) == (len(in_rings[0]) < len(before))
