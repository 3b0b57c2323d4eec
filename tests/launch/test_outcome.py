from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config.load import load
from engine.job import Job
from engine.launch import outcome
from engine.run import launches, metrics
from engine.run.folder import RunFolder


def test_a_run_ends_with_the_median_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as `runs list` and its page show; without steps there is none."""
    monkeypatch.setattr(outcome, "write_page", lambda folder, say: None)
    said, folder = list[str](), RunFolder(tmp_path)
    launch: Any = SimpleNamespace(job=Job(load([])), folder=folder, say=said.append)
    start: Any = SimpleNamespace(step=0, plans=False, corpora=SimpleNamespace(overview=None))
    assert outcome.outcome(launch, start)["train"]["tokens_per_s"] is None and said == []
    launches.begin(folder.launches, 1, 2, ["a"])
    for step, rate in enumerate((1.0, 500.0, 700.0), start=1):
        metrics.append(folder.metrics, {"step": step, "loss": 2.5, "tokens_per_s": rate, "mfu": 0.5, "unsplit": 0.25})
    found = outcome.outcome(launch, start)["train"]
    assert (found["tokens_per_s"], found["mfu"], found["unsplit"]) == (600.0, 0.5, 0.25)
    assert len(said) == 1 and said[0].startswith("600 tokens/s") and "MFU 50.0%" in said[0]
