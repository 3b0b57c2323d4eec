from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.cost.times import shared, unsplit
from engine.planner.baselines.columns import ring_times, stacked
from tests.planner.samples import RATES, ints

ONE_NODE = np.zeros(10, dtype=np.int64)


def test_the_picture_of_the_file() -> None:
    times, degrees = ints(9, 8, 8, 6, 5, 5, 4), ints(4, 4, 3, 3, 2, 2, 2)
    stack = stacked(times, degrees, ONE_NODE, 2, 32)
    assert stack.first.tolist() == [0, 0, 4, 4, 4, 4, 0]
    assert stack.load.tolist() == [21, 21, 17, 17, 24, 24, 14, 0, 0, 0]
    assert stack.longest.tolist() == [9, 9, 9, 9, 8, 8, 8, 0, 0, 0]


@given(st.data())
def test_columns_only_split(data: st.DataObject) -> None:
    """All ranks of a ring ran the same rings before it; only a column's first ring may exceed the limit."""
    nodes = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    node_of = np.repeat(np.arange(len(nodes)), nodes)
    degrees = sorted(data.draw(st.lists(st.integers(1, len(node_of)), max_size=25)), reverse=True)
    times = data.draw(st.lists(st.integers(1, 50), min_size=len(degrees), max_size=len(degrees)))
    stages, limit = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 400))
    stack = stacked(ints(*times), ints(*degrees), node_of, stages, limit)
    enough = sum(times) + (stages - 1) * max(times, default=0)
    assert len(stack.first) == len(degrees) or limit < enough
    ran: list[list[int]] = [[] for _ in node_of]
    for ring, first in enumerate(stack.first.tolist()):
        members = ran[first : first + degrees[ring]]
        assert len(members) == degrees[ring] and all(rings == members[0] for rings in members)
        for rings in members:
            rings.append(ring)
    if len(stack.first) == len(degrees):
        own = [[times[ring] for ring in rings] for rings in ran]
        assert stack.load.tolist() == [sum(one) for one in own]
        assert stack.longest.tolist() == [max(one, default=0) for one in own]
        assert all(sum(one) + (stages - 1) * max(one) <= limit for one in own if len(one) > 1)


def test_the_time_of_a_ring_includes_transfers_and_a_micro_batch() -> None:
    times = ring_times(RATES, ints(100, 100, 90), ints(3, 5, 1), 4)
    expected = [shared(RATES, 100.0, 3, 1.0), shared(RATES, 100.0, 5, RATES.inter_node_slowdown), unsplit(RATES, 90.0)]
    assert times.tolist() == [round(time + RATES.micro) for time in expected]
