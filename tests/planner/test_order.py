from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import PlanError
from engine.planner.order import edges, execution_order, gang_order, topological
from tests.planner.samples import by_hand, ints


def test_a_rank_runs_each_micro_batch_forward_then_backward() -> None:
    plan = by_hand([9, 3], [(0, 1), (0,)], [[[1], [0]], [[0]]])
    nodes, start = execution_order(plan)
    assert plan.gang.tolist() == [0, 1, 1]
    assert nodes.tolist() == [0, 1, 2, 3, 2, 3] and start.tolist() == [0, 4, 6]
    before, after = edges(plan)
    assert set(zip(before.tolist(), after.tolist(), strict=True)) == {(0, 1), (1, 2), (2, 3)}


def test_an_order_is_found_whatever_the_gangs_are_called() -> None:
    plan = by_hand([9, 9, 3], [(0, 1), (1, 2), (0,)], [[[2], [0]], [[0], [1]], [[1]]])
    assert gang_order(plan).tolist() == [0, 1, 2]
    assert gang_order(replace(plan, gang=2 - plan.gang)).tolist() == [2, 1, 0]


def test_a_cycle_is_named() -> None:
    plan = by_hand([9, 9], [(0, 1), (1, 0)], [[[0], [1]], [[1], [0]]])
    with pytest.raises(PlanError, match="gangs 0, 1 wait for each other"):
        gang_order(plan)


@given(st.integers(1, 12), st.data())
def test_the_order_agrees_with_all_edges_or_leaves_out_a_cycle(nodes: int, data: st.DataObject) -> None:
    node = st.integers(0, nodes - 1)
    pairs = data.draw(st.lists(st.tuples(node, node), max_size=20))
    order = topological(nodes, ints(*(a for a, _ in pairs)), ints(*(b for _, b in pairs)))
    place = {number: at for at, number in enumerate(order)}
    for before, after in pairs:
        assert after not in place or place[before] < place[after]
    reach = np.eye(nodes, dtype=bool)
    step = np.zeros((nodes, nodes), dtype=bool)
    for before, after in pairs:
        step[before, after] = True
    for _ in range(nodes):
        reach |= (reach.astype(int) @ step.astype(int)) > 0
    on_cycle = (step.astype(int) @ reach.astype(int)).diagonal() > 0
    assert (len(order) == nodes) == (not on_cycle.any())
