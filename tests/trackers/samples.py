"""Run folders for trackers, and their processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from engine.config.load import load, resolved_yaml
from engine.run.folder import RunFolder
from engine.run.metrics import append, cut_back
from tests.root import ROOT


def run_folder(tmp_path: Path, steps: int = 0) -> RunFolder:
    """A run folder with the metrics of `steps` steps."""
    folder = RunFolder(tmp_path / "try")
    folder.logs.mkdir(parents=True)
    folder.resolved.write_text(resolved_yaml(load([f"run.out={folder.root}", "optimizer.lr=0.25"])))
    cut_back(folder.metrics, 0)
    finish_steps(folder, 1, steps)
    return folder


def line(step: int) -> dict[str, Any]:
    """A line of metrics: numbers, numbers by source, and values that are no numbers."""
    of_sources = {"validation_losses": {"web": 8.0 / step}, "validation_loss": 6.0 / step} if step % 2 == 0 else {}
    return {"step": step, "loss": 4.0 / step, "tokens": 1000 + step, "host_short": None, "ended": "so", **of_sources}


def finish_steps(folder: RunFolder, first: int, last: int) -> None:
    for step in range(first, last + 1):
        append(folder.metrics, line(step))


def track(folder: RunFolder, name: str) -> subprocess.CompletedProcess[str]:
    """Run the process of a tracker until it has written all steps."""
    command = [sys.executable, "-m", "engine.trackers", str(folder.root), name]
    return subprocess.run(command, input="", capture_output=True, text=True, timeout=120, cwd=ROOT)
