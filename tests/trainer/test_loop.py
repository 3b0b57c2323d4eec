from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from engine.config.load import load
from engine.trainer.folder import RunFolder
from engine.trainer.loop import Trainer


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
