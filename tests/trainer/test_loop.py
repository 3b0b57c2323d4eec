from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine.config.load import load
from engine.errors import MemoryFitError
from engine.trainer.folder import RunFolder
from engine.trainer.loop import Trainer
from engine.trainer.model import room_for
from tests.planner.samples import by_hand


def traced(folder: RunFolder, degrees: list[list[int]]) -> list[int]:
    """Log a step of each of the given degrees; return which step's trace lay there after each."""
    trainer = Trainer.__new__(Trainer)
    trainer.folder, trainer.traced = folder, (0, False)
    trainer.config = load(["run.checkpoint_every=3", f"run.steps={len(degrees)}"])
    trainer.groups = SimpleNamespace(rank=0)  # type: ignore[assignment]
    found = []
    for step, of_step in enumerate(degrees, 1):
        trainer.step = step
        plan = SimpleNamespace(degrees=np.array(of_step), to_bytes=lambda: b"")
        trainer._log({"step": step, "max_degree": max(of_step)}, plan, [])  # type: ignore[arg-type]
        found.append(json.loads(folder.trace.read_text())["step"])
    return found


def test_a_trace_is_written_when_it_shows_more_or_with_a_checkpoint(tmp_path: Path) -> None:
    """Each is four fsyncs, in the middle of training."""
    same = [2, 1]
    assert traced(RunFolder(tmp_path), [same] * 7) == [1, 1, 3, 3, 3, 6, 7]
    assert traced(RunFolder(tmp_path), [[1], [2], same, same, [4], same, same]) == [1, 2, 3, 3, 5, 5, 5]


class Host:
    """Offload on a host that gives so many bytes for each rank."""

    def __init__(self, bytes_: int) -> None:
        self.bytes = bytes_

    def make_room(self, ratio: float, tokens: int) -> None:
        if ratio * tokens > self.bytes:
            raise MemoryFitError(f"the host gave no {ratio * tokens:.0f} bytes", hint="less")


@pytest.mark.parametrize("step", [0, 7])
def test_a_host_that_gives_no_room_ends_all_ranks_with_what_is_trained_saved(step: int) -> None:
    """Rank 1 gets less than its second micro-batch takes: both stop before the step, and say whose host it was."""
    plan = by_hand([30, 20, 40], [(0,), (1,), (1,)], [[[0]], [[1], [2]]])
    plan.offload[:] = 1_000_000
    trainers, saved = [Trainer.__new__(Trainer) for _ in range(2)], []
    said = [room_for(plan, rank, Host(35)) for rank in range(2)]  # type: ignore[arg-type]
    for rank, trainer in enumerate(trainers):
        trainer.step, trainer.groups = step, SimpleNamespace(rank=rank)  # type: ignore[assignment]
        trainer.model = SimpleNamespace(offload=Host(35))  # type: ignore[assignment]
        trainer._exchange = lambda problem: said  # type: ignore[method-assign]
        trainer.save = lambda: saved.append(step)  # type: ignore[method-assign]
        with pytest.raises(MemoryFitError, match="rank 1: the host gave no 40 bytes"):
            trainer._make_room(plan)
        trainer.model = SimpleNamespace(offload=None)  # type: ignore[assignment]
        trainer._make_room(plan)
    assert said[0] is None and saved == [step] * (2 if step else 0)
