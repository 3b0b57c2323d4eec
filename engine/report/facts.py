"""The words and numbers of a report: its head and its table, as (name, value) pairs of text."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from engine.cluster.cluster import Cluster
from engine.config.units import counted
from engine.report.data import RunData
from engine.report.words import Pair


def head(run: RunData) -> list[Pair]:
    """Return what the run was and how it ended."""
    config = run.config
    loss = run.column("loss")
    mode = f", {run.trace.plan.mode}" if run.trace else ""
    return [
        ("model", _model(run)),
        ("ranks", f"{run.trace.plan.ranks if run.trace else Cluster.of(config.cluster).ranks:,}"),
        ("planner", config.planner.name + mode),
        ("steps", f"{len(run.lines):,} of {config.run.steps:,}"),
        ("final training loss", _nats(loss[-1]) if len(loss) else "no step has finished"),
        ("final validation loss", _validation(run)),
    ]


def table(run: RunData) -> list[Pair]:
    """Return the figures of all steps together; empty before the first."""
    if not run.lines:
        return []
    degree, tokens, seconds = run.column("max_degree"), run.column("tokens"), run.column("step_s")
    rings = int((degree >= 2).sum())
    return [
        ("steps", f"{len(run.lines):,}"),
        ("tokens", f"{int(np.nansum(tokens)):,}"),
        ("steps with a ring of 2 or more", f"{rings:,} ({rings / len(degree):.0%})"),
        ("largest ring", _largest(degree)),
        ("median throughput", f"{_median(run.column('tokens_per_s')):,.0f} tokens/s"),
        ("wait for plans", _share(run.column("plan_wait_s"), seconds)),
        ("wait for data", _share(run.column("data_wait_s"), seconds)),
    ]


def warning(run: RunData) -> str | None:
    """Return a sentence on steps whose loss is not finite, if there are any."""
    bad = np.flatnonzero(~np.isfinite(run.column("loss")))
    if len(bad) == 0:
        return None
    first = run.lines[int(bad[0])]["step"]
    return f"The loss is not finite at {len(bad):,} of {counted(len(run.lines), 'step')}, first at step {first:,}."


def _model(run: RunData) -> str:
    parameters = run.summary.get("parameters")
    return run.config.model.name + (f", {parameters:,} parameters" if parameters is not None else "")


def _validation(run: RunData) -> str:
    made = [line["validation_loss"] for line in run.lines if line.get("validation_loss") is not None]
    if not made:
        return "none was made"
    if math.isnan(run.bigram_nats):
        return _nats(made[-1])
    verdict = "below" if made[-1] < run.bigram_nats else "not below"
    return f"{_nats(made[-1])}, {verdict} the corpus's bigram entropy of {run.bigram_nats:.3f}"


def _nats(loss: float) -> str:
    return f"{loss:.3f} nats a token" if math.isfinite(loss) else "not finite"


def _median(values: NDArray[np.float64]) -> float:
    kept = values[np.isfinite(values)]
    return float(np.median(kept)) if len(kept) else math.nan


def _largest(degree: NDArray[np.float64]) -> str:
    largest = int(np.nanmax(degree))
    return f"{largest:,} ranks" if largest > 1 else "none"


def _share(waits: NDArray[np.float64], seconds: NDArray[np.float64]) -> str:
    wait, whole = float(np.nansum(waits)), float(np.nansum(seconds))
    return f"{wait:,.2f} s ({wait / whole:.1%} of step time)" if whole > 0 else f"{wait:,.2f} s"
