from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import PlanError
from engine.planner.plan.emit import Group, Placement, build, emit
from engine.units import Ints
from tests.planner.samples import ints


def test_the_example_in_the_docstring() -> None:
    groups: list[Group] = [[(0, (0, 1)), (3, (2,))], [(1, (0,)), (2, (0,))]]
    plan = emit("by hand", "free", 4, 16, ints(8, 2, 3, 4), groups)
    runs = [[[s.sequence for s in micro.shards] for micro in plan.of_rank(rank)] for rank in range(4)]
    assert runs == [[[0], [1, 2]], [[0]], [[3]], [[]]]
    assert [[micro.gang for micro in plan.of_rank(rank)] for rank in range(4)] == [[0, 2], [0], [1], [3]]


@st.composite
def random_groups(draw: st.DrawFn) -> tuple[int, list[int], list[Group]]:
    ranks = draw(st.integers(1, 8))
    count = draw(st.integers(1, 15))
    ring = st.permutations(range(ranks)).flatmap(lambda order: st.integers(1, ranks).map(lambda d: tuple(order[:d])))
    groups: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(count)]
    for sequence in range(count):
        groups[draw(st.integers(0, count - 1))].append((sequence, draw(ring)))
    return ranks, draw(st.lists(st.integers(1, 99), min_size=count, max_size=count)), list(groups)


@given(random_groups())
def test_every_rank_runs_its_gangs_in_the_global_order(case: tuple[int, list[int], list[Group]]) -> None:
    """Note: [why rings cannot deadlock] rests on it."""
    ranks, lengths, groups = case
    plan = emit("random", "free", ranks, 10**6, ints(*lengths), groups)
    group_of = {sequence: number for number, group in enumerate(groups) for sequence, _ in group}
    for number, group in enumerate(groups):
        for sequence, ring in group:
            assert plan.ring(sequence) == tuple(ring), number
    for rank in range(ranks):
        micros = list(plan.of_rank(rank))
        gangs = [micro.gang for micro in micros]
        assert gangs == sorted(set(gangs)) and len(micros) >= 1
        runs = [{group_of[shard.sequence] for shard in micro.shards} for micro in micros]
        assert all(len(numbers) == 1 for numbers in runs) or runs == [set()]
        assert [min(numbers) for numbers in runs if numbers] == sorted(min(numbers) for numbers in runs if numbers)


@pytest.mark.parametrize(
    ("group", "ring_start", "ring_ranks"),
    [
        (ints(0, 0), ints(0, 1, 2), ints(0, 3)),
        (ints(0, 0), ints(0, 1, 2), ints(-1, 0)),
        (ints(0, 0), ints(0, 2, 2), ints(0, 1)),
        (ints(0), ints(0, 1, 2), ints(0, 1)),
        (ints(0, -1), ints(0, 1, 2), ints(0, 1)),
    ],
)
def test_what_compiled_code_does_not_check_is_refused(group: Ints, ring_start: Ints, ring_ranks: Ints) -> None:
    with pytest.raises(PlanError) as caught:
        build("by hand", "free", 3, 16, Placement(np.full(len(group), 5), group, ring_start, ring_ranks))
    assert caught.value.rule == 0


@given(random_groups())
def test_in_lockstep_a_group_is_a_slot(case: tuple[int, list[int], list[Group]]) -> None:
    ranks, lengths, groups = case
    plan = emit("random", "lockstep", ranks, 10**6, ints(*lengths), groups)
    slots = max(number for number, group in enumerate(groups) if group) + 1
    for rank in range(ranks):
        for slot, micro in enumerate(plan.of_rank(rank)):
            here = [sequence for sequence, ring in sorted(groups[slot]) if rank in ring]
            assert (micro.slot, [shard.sequence for shard in micro.shards]) == (slot, here)
        assert len(list(plan.of_rank(rank))) == slots
        assert (np.diff(plan.gang[plan.micro_rank == rank]) > 0).all()
