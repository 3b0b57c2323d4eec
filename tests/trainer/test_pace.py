from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.config.load import load
from engine.job import Job
from engine.planner.plan.step_plan import StepPlan
from engine.trainer.pace import STEPS, Pace
from engine.trainer.step import StepTimes
from tests.planner.samples import by_hand

SETTINGS = Job(load(["recipe=quickstart"])).settings


def plan() -> StepPlan:
    """Rank 0 has a ring and two micro-batches of its own, of which one is of two sequences; rank 1 the ring only."""
    return by_hand([30, 20, 40, 10], [(0, 1), (0,), (0,), (0,)], [[[0], [1], [2, 3]], [[0]]])


def times(plan: StepPlan, rank: int, alone: float, ring: float) -> StepTimes:
    """Micro-batches that take so many times longer than planned; the ring takes `ring` seconds."""
    costs, now, marks = SETTINGS.costs, 5.0, []
    for micro in plan.of_rank(rank):
        lengths = np.array([shard.length for shard in micro.shards])
        planned = (costs.rates.micro + int(costs.sequence(lengths).sum())) / 1e9
        took = ring if micro.shards[0].degree > 1 else alone * planned
        marks.append((micro.index, now, now + took))
        now += took
    return StepTimes(5.0, marks=marks)


@pytest.mark.parametrize("ring", [0.0, 9.0])
def test_the_pace_is_that_of_work_without_rings(ring: float) -> None:
    """In a ring all members take as long as the slowest. One slow step, such as one that compiles, changes nothing."""
    pace, step = Pace(SETTINGS.costs), plan()
    found = [pace.of_steps(step, times(step, 0, 3.0, ring)) for _ in range(STEPS - 1)]
    assert found == [None] * (STEPS - 1)
    assert pace.of_steps(step, times(step, 0, 500.0, ring)) == pytest.approx(3.0)
    for _ in range(STEPS):
        last = pace.of_steps(step, times(step, 0, 7.0, ring))
    assert last == pytest.approx(7.0)


def test_the_slices_of_a_sequence_take_as_long_as_it_is_long() -> None:
    """A slice also attends to the earlier ones. If they were left out, ranks with slices would be reported as slow."""
    shared = plan()
    step = replace(shared, lengths=np.array([30, 20, 40, 10]), before=np.array([0, 0, 20, 0]))
    assert [shard.earlier for micro in step.of_rank(0) for shard in micro.shards] == [(), (), (20,), ()]
    pace, costs = Pace(SETTINGS.costs), SETTINGS.costs
    whole, alone = (int(costs.sequence(np.array([length])).sum()) for length in (60, 10))
    fixed = int(costs.sequence(np.array([0])).sum())  # of each slice
    took = (2 * costs.rates.micro + whole + fixed + alone) / 1e9
    _, first, second = step.of_rank(0)
    spans = StepTimes(0.0, marks=[(first.index, 0.0, took / 3), (second.index, took / 3, took)])
    found = [pace.of_steps(step, spans) for _ in range(STEPS)]
    assert found[-1] == pytest.approx(1.0, rel=1e-6)


def test_the_passes_of_a_micro_batch_in_a_pipeline_count_as_one() -> None:
    """Otherwise stages whose backward passes follow later would be twice as fast as the last one."""
    pace, step = Pace(SETTINGS.costs), plan()
    (number, start, end), *others = times(step, 0, 3.0, 0.0).marks
    middle = (float(start) + float(end)) / 2
    spans = StepTimes(5.0, marks=[(number, start, middle), *others, (number, end, float(end) + float(end) - middle)])
    assert [pace.of_steps(step, spans) for _ in range(STEPS)][-1] == pytest.approx(3.0)


def test_a_rank_that_only_has_rings_has_no_pace() -> None:
    pace, step = Pace(SETTINGS.costs), plan()
    assert [pace.of_steps(step, times(step, 1, 3.0, 1.0)) for _ in range(STEPS)] == [None] * STEPS
