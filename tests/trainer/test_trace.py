"""The report's timeline: of which step it is, and that rank 0 gets the spans of every rank that is drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.cluster.mesh import Mesh
from engine.control.control import Control
from engine.parallel.groups import Groups
from engine.planner.plan.step_plan import StepPlan
from engine.report.boxes import Span, of_plan
from engine.run.folder import RunFolder
from engine.trainer.step import StepTimes
from engine.trainer.trace import Trace
from tests.planner.samples import by_hand
from tests.world import control, run_world


def traced(folder: RunFolder, degrees: list[list[int]]) -> list[int]:
    """Record a step of each of the given degrees; return which step's trace was there after each."""
    trace, found = Trace(folder, Groups(0, Mesh(1), torch.device("cpu"), None, Control(0))), []  # type: ignore[arg-type]
    for step, of_step in enumerate(degrees, 1):
        micros = [[[one for one, degree in enumerate(of_step) if rank < degree]] for rank in range(4)]
        plan = by_hand([8] * len(of_step), [tuple(range(degree)) for degree in of_step], micros)
        times = StepTimes(0.0, marks=[(0, 0.0, 1.0)])
        trace.record(step, plan, times, checkpoint_due=step % 3 == 0 or step == len(degrees))
        found.append(json.loads(folder.trace.read_text())["step"])
    return found


def test_a_trace_is_written_when_it_shows_more_or_with_a_checkpoint(tmp_path: Path) -> None:
    """Each is four fsyncs, in the middle of training."""
    same = [2, 1]
    assert traced(RunFolder(tmp_path), [same] * 7) == [1, 1, 3, 3, 3, 6, 7]
    assert traced(RunFolder(tmp_path), [[1], [2], same, same, [4], same, same]) == [1, 2, 3, 3, 5, 5, 5]


def test_a_resumed_run_keeps_the_better_trace_that_it_finds(tmp_path: Path) -> None:
    folder, few = RunFolder(tmp_path), Groups(0, Mesh(1), torch.device("cpu"), None, Control(0))  # type: ignore[arg-type]
    written = by_hand([30, 20], [(0, 1), (0,)], [[[0], [1]], [[0]]])

    def shown_after_resume() -> tuple[int, bool]:
        trace = Trace(folder, few)
        trace.resume(few.control)
        return trace._shown

    assert shown_after_resume() == (0, False)
    folder.plan.write_bytes(written.to_bytes())
    assert shown_after_resume() == (2, True)
    for damaged in (written.to_bytes()[:-9], written.to_bytes().replace(b'"planner"', b'"planned"')):
        folder.plan.write_bytes(damaged)
        assert shown_after_resume() == (0, False)


def plan_of_three() -> StepPlan:
    """Ranks with one, two and one micro-batches."""
    return by_hand([30, 20, 40, 10], [(0,), (1,), (1,), (2,)], [[[0]], [[1], [2]], [[3]]])


def record(folder: Path) -> None:
    rank, plan = dist.get_rank(), plan_of_three()
    marks = [(micro.index, 10.0 + rank, 20.0 + rank + micro.index) for micro in plan.of_rank(rank)]
    assert dist.group.WORLD is not None
    trace = Trace(RunFolder(folder), Groups(rank, Mesh(3), torch.device("cpu"), dist.group.WORLD, control()))
    trace.record(5, plan, StepTimes(10.0, marks=marks), checkpoint_due=True)


@pytest.mark.world
def test_rank_0_writes_the_spans_of_all_ranks(tmp_path: Path) -> None:
    """Ranks have different numbers of micro-batches."""
    run_world(3, record, tmp_path)
    written = json.loads(RunFolder(tmp_path).trace.read_text())
    assert written == {
        "step": 5,
        "spans": [[0, 0, 0, 10, 0.0, 0], [1, 1, 1, 12, 0.0, 0], [1, 2, 1, 13, 0.0, 0], [2, 3, 2, 15, 0.0, 0]],
    }
    assert of_plan(plan_of_three(), [Span(*span) for span in written["spans"]])
