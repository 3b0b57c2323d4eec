"""What a run folder says of its run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config.load import read_resolved
from engine.config.schema import Config
from engine.errors import StorageError
from engine.planner.plan import StepPlan
from engine.report.boxes import Span, of_plan
from engine.trainer.folder import RunFolder
from engine.trainer.metrics import read_metrics


@dataclass(frozen=True)
class Trace:
    """One measured step: its number, its plan, and when each rank ran each micro-batch."""

    step: int
    plan: StepPlan
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class RunData:
    """A run as its folder tells it. `trace` is None if no whole one was written; `summary` may be empty."""

    config: Config
    summary: Mapping[str, float]
    lines: tuple[Mapping[str, Any], ...]  # one a step, as in metrics.jsonl
    trace: Trace | None

    def column(self, name: str) -> NDArray[np.float64]:
        """Return one metric of all steps, [steps]; NaN where a line does not have it."""
        values = (line.get(name) for line in self.lines)
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)

    @property
    def bigram_nats(self) -> float:
        """Return the bigram entropy of the corpus, in nats a token; NaN if the run ended before it was known."""
        return self.summary.get("bigram_nats", float("nan"))


def read_run(folder: Path) -> RunData:
    """Return the run in a folder, whole or stopped early. Raises ConfigError if it has no readable resolved.yaml.

    Raises StorageError, which names the file, if another one is damaged.
    """
    run = RunFolder(folder)
    with _named(run.summary):
        summary = {**json.loads(run.summary.read_text(encoding="utf-8"))} if run.summary.exists() else {}
    return RunData(read_resolved(run.resolved), summary, tuple(read_metrics(run.metrics)), _read_trace(run))


def _read_trace(run: RunFolder) -> Trace | None:
    if not (run.plan.exists() and run.trace.exists()):
        return None
    with _named(run.plan):
        plan = StepPlan.from_bytes(run.plan.read_bytes())
    with _named(run.trace):
        trace = json.loads(run.trace.read_text(encoding="utf-8"))
        spans = tuple(Span(*span) for span in trace["spans"])
        return Trace(trace["step"], plan, spans) if of_plan(plan, spans) else None


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name the file at which its reader fails, however it does: a damaged one may hold anything."""
    try:
        yield
    except Exception as error:
        message = f"is damaged: {type(error).__name__}: {error}"
        raise StorageError(message, key=str(path), hint="remove it: the page lacks what it held") from error
