"""The page that compares runs: which is the fastest, their losses and throughput, and where configs differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from engine.config.units import counted
from engine.report import headline
from engine.report.curves import STEPS, Curve, curves_picture, smooth, token_axis
from engine.report.page import Figure, Page, Table
from engine.report.run import RunData
from engine.report.run_page import duration, ranks_of
from engine.report.words import long_seconds, metric_text, number, value_texts
from engine.run.status import differences

_SPEEDS = {"tokens_per_s": "median tokens/s", "step_s": "median step", "mfu": "MFU", "unsplit": "unsplit tokens"}


def comparison_page(runs: Sequence[RunData], names: Sequence[str]) -> Page:
    """Build the page of two or more runs, which may have stopped early; `names` must differ."""
    named = [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    drawn = [run for run in named if run.lines]
    figures = [Figure("Loss", "No run has completed a step, so there is nothing to draw.")]
    if drawn:
        figures = [_losses(drawn), _throughput(drawn)]
    changed = differences([run.config for run in named])
    configs = Table("Where their configs differ", [], note="Only in run.out.")
    if changed:
        rows = [(key, *value_texts(key, values)) for key, values in changed.items()]
        configs = Table("Where their configs differ", rows, ("key", *names), text=True)
    without = [run.name for run in named if not run.lines]
    return Page(
        title=", ".join(names),
        kind="a comparison of ByteScale runs",
        headline=headline.of_runs([(run.lines, run.starts) for run in named], [run.config for run in named], names),
        head=[
            ("runs", str(len(named))),
            ("recipes", ", ".join(dict.fromkeys(run.config.recipe for run in named))),
            ("configs", f"differ in {counted(len(changed), 'key')}" if changed else "are equal"),
        ],
        figures=figures,
        tables=[Table("Key numbers of the runs", _numbers(named), ("", *names)), configs],
        warning=f"No step was completed by {', '.join(without)}." if without else None,
    )


def _losses(runs: Sequence[RunData]) -> Figure:
    along = token_axis(max(float(run.tokens[-1]) for run in runs))
    curves = smooth([Curve(run.name, run.tokens, run.column("loss")) for run in runs])
    caption = (
        "Training loss of each run over the tokens that it was trained on: the running median of about a tenth of the "
        "steps, since noise hides how runs differ. Where curves coincide, the later ones are the thinner ones."
    )
    return Figure.of("Loss", caption, partial(curves_picture, "loss", "Loss", curves, along, "loss (nats per token)"))


def _throughput(runs: Sequence[RunData]) -> Figure:
    curves = smooth([Curve(run.name, run.column("step"), run.column("tokens_per_s")) for run in runs])
    caption = "Tokens per second, all ranks of a run together; running medians. Validation does not count."
    picture = partial(
        curves_picture, "throughput", "Throughput", curves, STEPS, "throughput (tokens/s)", from_zero=True
    )
    return Figure.of("Throughput", caption, picture)


def _numbers(runs: Sequence[RunData]) -> list[tuple[str, ...]]:
    """Rows with a column per run. The loss at the last step that all runs have is the one to compare."""
    losses = [dict(zip(run.column("step").tolist(), run.column("loss").tolist(), strict=True)) for run in runs]
    common = max(set.intersection(*map(set, losses)), default=None)

    def last(run: RunData, name: str) -> str:
        values = run.column(name)
        kept = values[np.isfinite(values)]
        return number(float(kept[-1])) if len(kept) else "-"

    rows = [
        ("steps", *(f"{len(run.lines):,} of {run.config.run.steps:,}" for run in runs)),
        ("tokens", *(f"{run.tokens[-1]:,.0f}" if run.lines else "0" for run in runs)),
        ("last training loss", *(last(run, "loss") for run in runs)),
        ("last validation loss", *(last(run, "validation_loss") for run in runs)),
        *((label, *(metric_text(run.speed, name) for run in runs)) for name, label in _SPEEDS.items()),
        ("time in steps", *(long_seconds(float(run.seconds[-1])) if run.lines else "-" for run in runs)),
        ("duration", *(duration(run) or "-" for run in runs)),
        ("starts", *(str(len(run.launches)) if run.launches else "-" for run in runs)),
        ("ranks", *(ranks_of(run) for run in runs)),
        ("planner", *(run.config.planner.name for run in runs)),
    ]
    if common is not None:
        cells = (number(loss) if math.isfinite(loss) else "not finite" for loss in (one[common] for one in losses))
        rows.insert(2, (f"training loss at step {common:,.0f}", *cells))
    return rows
