from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from engine.planner.baselines.static import degree
from engine.planner.make import plan_step
from tests.planner.samples import ints, lengths, settings


@given(st.integers(1, 24), st.integers(1, 400))
def test_the_degree_is_the_least_divisor_that_holds_the_context(ranks: int, context: int) -> None:
    divisors = [cp for cp in range(1, ranks + 1) if ranks % cp == 0]
    holds = [cp for cp in divisors if 16 * cp >= context]
    assert degree(settings("static", ranks, capacity=16, context=context)) == min([*holds, ranks])


@given(st.data())
def test_every_sequence_is_split_over_all_ranks_of_one_group(data: st.DataObject) -> None:
    asked = settings("static", ranks=12, capacity=16, context=50)
    step = ints(*data.draw(lengths(50)))
    plan = plan_step(step, asked)
    for sequence in range(plan.sequences):
        first = plan.ring(sequence)[0]
        assert first % 4 == 0
        assert plan.ring(sequence) == tuple(range(first, first + 4))


def test_buffers_of_uneven_rings_are_counted_where_a_micro_batch_needs_offload() -> None:
    """Three rings put 12 tokens on the second rank, whose buffers have the first rank's size, 15 tokens."""
    asked = settings("static", ranks=2, capacity=15, context=30)
    costs = replace(asked.costs, layers=32, ring_bytes=300)
    device = int(costs.peak_bytes(ints(12), ints(15), 300_000)[0])
    full = int(costs.peak_bytes(ints(15), ints(15), 1_000_000)[0])
    asked = replace(settings("static", 2, 15, context=30, device_memory=max(device, full)), costs=costs)
    plan = plan_step(ints(9, 9, 9), replace(asked, offload=1_000_000, host_memory=10**6))
    assert plan.offload.min() > 0
