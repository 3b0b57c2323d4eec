from __future__ import annotations

import numpy as np
import pytest
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


def test_bubbles_count() -> None:
    """Three rings of 5 on one column: 15 and, with three stages, 10 of bubbles."""
    times, degrees = ints(5, 5, 5), ints(4, 4, 4)
    assert stacked(times, degrees, ONE_NODE, 3, 25).first.tolist() == [0, 0, 0]
    assert stacked(times, degrees, ONE_NODE, 3, 24).first.tolist() == [0, 0, 4]


def test_a_ring_that_is_too_long_for_the_limit_opens_a_column() -> None:
    assert stacked(ints(5, 5), ints(5, 5), ONE_NODE, 2, 1).first.tolist() == [0, 5]


def test_rings_that_do_not_fit_are_reported() -> None:
    assert len(stacked(ints(5, 5, 5), ints(5, 5, 5), ONE_NODE, 2, 1).first) == 0


def test_no_rings_make_an_empty_stack() -> None:
    stack = stacked(ints(), ints(), ONE_NODE, 2, 1)
    assert len(stack.first) == 0 and stack.load.tolist() == stack.longest.tolist() == [0] * 10


@pytest.mark.parametrize(
    ("nodes", "degrees", "first"),
    [
        ([4, 4, 4], [3, 3, 3], [0, 4, 8]),
        ([4, 4, 4], [3, 3, 3, 1], [0, 4, 8, 7]),  # ranks left over next to a border are used
        ([4, 4, 4], [5, 3, 3], [0, 5, 8]),
        ([4, 4, 2], [6, 3], [0, 6]),  # does not fit inside a node
        ([2, 2, 2], [3, 3], [0, 3]),
    ],
)
def test_a_column_that_fits_a_node_lies_in_one_if_possible(
    nodes: list[int], degrees: list[int], first: list[int]
) -> None:
    node_of = np.repeat(np.arange(len(nodes)), nodes)
    times = np.full(len(degrees), 9, dtype=np.int64)
    assert stacked(times, ints(*degrees), node_of, 2, 1).first.tolist() == first


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
