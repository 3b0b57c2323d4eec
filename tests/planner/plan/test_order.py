from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import PlanError
from engine.planner.make import plan_step
from engine.planner.plan.emit import emit
from engine.planner.plan.order import (
    Action,
    Pass,
    actions,
    edges,
    execution_order,
    gang_order,
    node_order,
    nodes,
    topological,
)
from engine.planner.plan.step_plan import StepPlan
from engine.planner.planners import PLANNERS
from tests.planner.pipelines import aligned_pipelines, any_pipelines, passes_agree
from tests.planner.samples import by_hand, ints, lengths, settings

PICTURE = ("F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")  # 1F1B, 3 stages


def four(stages: int = 3) -> StepPlan:
    """Make a pipeline of four micro-batches on one rank, in 1F1B order."""
    groups = [[(number, (0,))] for number in range(4)]
    return emit("by hand", "pipeline", 1, 16, ints(8, 8, 8, 8), groups, stages=stages)


def test_a_pipeline_runs_1f1b() -> None:
    """The picture in the file's docstring; without a pipeline each micro-batch runs forward and backward."""
    plan = four()
    for stage, row in enumerate(PICTURE):
        done = [action.done for action in actions(plan, 0, stage) if action.kind == "run"]
        assert " ".join(f"{'F' if one.forward else 'B'}{one.place}" for one in done) == row
    order, start = execution_order(plan.gang, plan.micro_start, plan.stages, plan.passes)
    rows = [order[start[stage] : start[stage + 1]] for stage in range(3)]
    assert [[node // 2 % 3 for node in row.tolist()] for row in rows] == [[stage] * 8 for stage in range(3)]
    assert tuple(" ".join(f"{'FB'[node % 2]}{node // 6}" for node in row.tolist()) for row in rows) == PICTURE
    free = by_hand([8, 8], [(0,), (0,)], [[[0], [1]]])
    ran = [Pass(0, True), Pass(0, False), Pass(1, True), Pass(1, False)]
    assert actions(free, 0) == [Action("run", one) for one in ran]
    assert actions(free, 0, backward=False) == [Action("run", one) for one in ran[::2]]


def test_a_device_sends_after_its_pass_and_receives_where_the_list_has_the_other_pass() -> None:
    plan = replace(four(2), passes=ints(0, 2, 4, 3, 6, 1, 8, 7, 10, 5, 12, 11, 14, 9, 15, 13))
    first = " ".join(f"{kind[0]}{'BF'[done.forward]}{done.place}" for kind, done in actions(plan, 0, 0))
    assert first == "rF0 sF0 rF1 sF1 rB0 rB0 rF2 sF2 rB1 rB1 rF3 sF3 rB2 rB2 rB3 rB3"
    last = " ".join(f"{kind[0]}{'BF'[done.forward]}{done.place}" for kind, done in actions(plan, 0, 1))
    assert last == "rF0 rF0 rF1 rB0 sB0 rF1 rF2 rB1 sB1 rF2 rF3 rB2 sB2 rF3 rB3 sB3"


@given(st.one_of(aligned_pipelines, any_pipelines()))
def test_the_order_agrees_with_all_edges_or_there_is_a_cycle(plan: StepPlan) -> None:
    before, after = edges(plan)
    found = topological(nodes(plan), before, after)
    try:
        order = node_order(plan)
    except PlanError:
        assert len(found) < nodes(plan)
        return
    assert passes_agree(plan, order, before, after) and passes_agree(plan, found, before, after)
    assert sorted(gang_order(plan).tolist()) == list(range(plan.gangs))


@given(st.integers(1, 12), st.data())
def test_the_order_agrees_with_all_edges_or_leaves_out_a_cycle(count: int, data: st.DataObject) -> None:
    node = st.integers(0, count - 1)
    pairs = data.draw(st.lists(st.tuples(node, node), max_size=20))
    order = topological(count, ints(*(a for a, _ in pairs)), ints(*(b for _, b in pairs)))
    place = {number: at for at, number in enumerate(order)}
    for before, after in pairs:
        assert after not in place or place[before] < place[after]
    reach = np.eye(count, dtype=bool)
    step = np.zeros((count, count), dtype=bool)
    for before, after in pairs:
        step[before, after] = True
    for _ in range(count):
        reach |= (reach.astype(int) @ step.astype(int)) > 0
    on_cycle = (step.astype(int) @ reach.astype(int)).diagonal() > 0
    assert (len(order) == count) == (not on_cycle.any())


@pytest.mark.parametrize(("mode", "stages"), [("free", 1), ("lockstep", 1), ("pipeline", 3)])
@given(planner=st.sampled_from(sorted(PLANNERS)), lengths=lengths(40))
def test_the_order_of_every_planner_is_known_without_a_search(
    mode: str, stages: int, planner: str, lengths: list[int]
) -> None:
    own = settings(planner=planner, mode=mode, stages=stages)
    with patch("engine.planner.plan.order.topological", side_effect=AssertionError("searched")):
        node_order(plan_step(ints(*lengths), own))
