from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.baselines.static import degree
from engine.planner.make import plan_step
from engine.planner.plan.loads import micro_tokens
from engine.simulator.timeline import simulate
from tests.planner.samples import ints, lengths, settings


@pytest.mark.parametrize(
    ("ranks", "context", "expected"),
    [(1, 16, 1), (8, 16, 1), (8, 17, 2), (8, 33, 4), (8, 65, 8), (6, 33, 3), (6, 49, 6), (7, 17, 7), (12, 65, 6)],
)
def test_the_degree_is_the_least_divisor_that_holds_the_context(ranks: int, context: int, expected: int) -> None:
    assert degree(settings("static", ranks, capacity=16, context=context)) == expected


def test_the_degree_does_not_depend_on_the_step() -> None:
    asked = settings("static", ranks=6, capacity=16, context=48)
    for step in (ints(1), ints(48, 2), ints(3, 3, 3)):
        assert set(plan_step(step, asked).degrees.tolist()) == {3}


@given(st.data())
def test_every_sequence_is_split_over_all_ranks_of_one_group(data: st.DataObject) -> None:
    asked = settings("static", ranks=12, capacity=16, context=50)
    step = ints(*data.draw(lengths(50)))
    plan = plan_step(step, asked)
    for sequence in range(plan.sequences):
        first = plan.ring(sequence)[0]
        assert first % 4 == 0
        assert plan.ring(sequence) == tuple(range(first, first + 4))


def test_shards_are_packed_by_their_rounded_up_size() -> None:
    """Sixteen sequences of one token on two ranks fill a micro-batch: each may put its token on the same rank."""
    asked = settings("static", ranks=2, capacity=16, context=32)
    plan = plan_step(np.ones(17, dtype=np.int64), asked)
    assert np.diff(plan.micro_start).tolist() == [2, 2]
    assert micro_tokens(plan).tolist() == [16, 1, 0, 0]


def test_packed_bins_are_dealt_out_by_cost() -> None:
    """Bins of cost 4 3 3 2 on two groups: 4 with 2, 3 with 3."""
    asked = settings("static", ranks=2, capacity=400, context=400)
    plan = plan_step(ints(300, 400, 200, 299), asked)
    stop = simulate(plan, settings()).stop
    assert [sorted(s.length for m in plan.of_rank(r) for s in m.shards) for r in range(2)] == [[200, 400], [299, 300]]
    assert stop.max() < 1.2 * min(stop[plan.micro_rank == rank].max() for rank in range(2))


def test_buffers_of_uneven_rings_are_counted_where_a_micro_batch_needs_offload() -> None:
    """Three rings put 12 tokens on the second rank, whose buffers have the first rank's size, 15 tokens."""
    asked = settings("static", ranks=2, capacity=15, context=30)
    costs = replace(asked.costs, layers=32, ring_bytes=300, passing_bytes=0)
    device = int(costs.peak_bytes(ints(12), ints(15), 300_000)[0])
    full = int(costs.peak_bytes(ints(15), ints(15), 1_000_000)[0])
    asked = replace(settings("static", 2, 15, context=30, device_memory=max(device, full)), costs=costs)
    plan = plan_step(ints(9, 9, 9), replace(asked, offload=1_000_000, host_memory=10**6))
    assert plan.offload.min() > 0
