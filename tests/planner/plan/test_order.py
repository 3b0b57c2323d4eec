from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import PlanError
from engine.planner.make import PLANNERS, plan_step
from engine.planner.plan.emit import emit
from engine.planner.plan.order import edges, execution_order, gang_order, node_order, passes, topological
from engine.planner.plan.step_plan import StepPlan
from tests.planner.pipelines import aligned_pipelines, any_pipelines, passes_agree
from tests.planner.samples import by_hand, ints, lengths, settings


def test_a_rank_runs_each_micro_batch_forward_then_backward() -> None:
    plan = by_hand([9, 3], [(0, 1), (0,)], [[[1], [0]], [[0]]])
    nodes, start = execution_order(plan.gang, plan.micro_start, plan.stages)
    assert plan.gang.tolist() == [0, 1, 1]
    assert nodes.tolist() == [0, 1, 2, 3, 2, 3] and start.tolist() == [0, 4, 6]
    before, after = edges(plan)
    assert set(zip(before.tolist(), after.tolist(), strict=True)) == {(0, 1), (1, 2), (2, 3)}


def test_the_passes_of_each_stage() -> None:
    """The picture in the file's docstring; without a pipeline each micro-batch runs forward and backward."""
    picture = ("F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")
    for stage, row in enumerate(picture):
        assert " ".join(f"{'F' if one.forward else 'B'}{one.place}" for one in passes(4, stage, 3)) == row
    assert passes(2) == [(0, True), (0, False), (1, True), (1, False)]


def test_a_pipeline_runs_1f1b() -> None:
    """The picture in the file's docstring."""
    groups = [[(number, (0,))] for number in range(4)]
    plan = emit("by hand", "pipeline", 1, 16, ints(8, 8, 8, 8), groups, stages=3)
    nodes, start = execution_order(plan.gang, plan.micro_start, plan.stages)
    rows = [nodes[start[stage] : start[stage + 1]] for stage in range(3)]
    assert [[node // 2 % 3 for node in row.tolist()] for row in rows] == [[stage] * 8 for stage in range(3)]
    assert [" ".join(f"{'FB'[node % 2]}{node // 6}" for node in row.tolist()) for row in rows] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_a_short_pipeline_runs_all_forward_then_all_backward(stages: int) -> None:
    plan = emit("by hand", "pipeline", 1, 16, ints(8), [[(0, (0,))]], stages=stages)
    nodes, start = execution_order(plan.gang, plan.micro_start, plan.stages)
    assert nodes.tolist() == list(range(2 * stages)) and start.tolist() == list(range(0, 2 * stages + 1, 2))
    before, after = edges(plan)
    forward, backward = list(range(0, 2 * stages, 2)), list(range(2 * stages - 1, 0, -2))
    way = forward + backward  # through all stages and back
    assert set(pairwise(way)) <= set(zip(before.tolist(), after.tolist(), strict=True))


@given(st.one_of(aligned_pipelines, any_pipelines()))
def test_the_order_agrees_with_all_edges_or_there_is_a_cycle(plan: StepPlan) -> None:
    before, after = edges(plan)
    found = topological(2 * plan.stages * plan.gangs, before, after)
    try:
        order = node_order(plan)
    except PlanError:
        assert len(found) < 2 * plan.stages * plan.gangs
        return
    assert passes_agree(plan, order, before, after) and passes_agree(plan, found, before, after)
    assert sorted(gang_order(plan).tolist()) == list(range(plan.gangs))


def test_an_order_is_found_for_any_numbers_of_gangs() -> None:
    plan = by_hand([9, 9, 3], [(0, 1), (1, 2), (0,)], [[[2], [0]], [[0], [1]], [[1]]])
    assert gang_order(plan).tolist() == [0, 1, 2]
    assert gang_order(replace(plan, gang=2 - plan.gang)).tolist() == [2, 1, 0]


def test_a_cycle_is_reported_with_its_gangs() -> None:
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


@pytest.mark.parametrize(("mode", "stages"), [("free", 1), ("lockstep", 1), ("pipeline", 3)])
@pytest.mark.parametrize("planner", PLANNERS)
@given(lengths=lengths(40))
def test_the_order_of_every_planner_is_known_without_a_search(
    planner: str, mode: str, stages: int, lengths: list[int]
) -> None:
    own = settings(planner=planner, mode=mode, stages=stages)
    with patch("engine.planner.plan.order.topological", side_effect=AssertionError("searched")):
        node_order(plan_step(ints(*lengths), own))
