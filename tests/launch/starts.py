"""Configs, checkpoints and ends of small runs whose ranks are stand-ins."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.data.overview import Corpora
from engine.data.steps import Cursor
from engine.launch import supervise
from engine.run.checkpoints import TrainState
from engine.run.compatibility import must_match
from engine.run.folder import RunFolder
from engine.run.metrics import append
from tests.run.damage import write_all


def config(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "data").mkdir(exist_ok=True)
    for number in range(12):
        (tmp_path / "data" / f"{number}.py").write_text(f"print({number})\n" * 40)
    small = ["recipe=quickstart", f"data.path={tmp_path / 'data'}", f"run.out={tmp_path / 'run'}"]
    return load([*small, "context=256", "capacity=128", "batch_tokens=1K", *overrides])


def files(tmp_path: Path) -> list[str]:
    """All paths below a folder."""
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))


def saved(tmp_path: Path, of: Config, step: int = 1) -> Path:
    """Write a checkpoint of two ranks, with one file."""
    state = TrainState(step, Cursor(step).to_json(), 2, Corpora(of).fingerprints, must_match(of))
    return write_all(tmp_path, state, "a")


def finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int, error: Exception | None = None) -> Config:
    """Let the ranks write metrics and end, with an error or without; let the report fail. Return a config."""
    settings = config(tmp_path, "run.steps=2")

    def run_ranks(commands: object, folder: RunFolder, *rest: object) -> None:
        for step in range(1, lines + 1):
            append(folder.metrics, {"step": step, "loss": 3.0})
        if error is not None:
            raise error

    def broken(folder: Path) -> Path:
        raise ValueError("no\nfonts")

    monkeypatch.setattr(supervise, "run_ranks", run_ranks)
    monkeypatch.setattr("engine.report.run_page.write_report", broken)
    return settings
