"""The page of a run: its loss, one measured step, its throughput."""

from __future__ import annotations

from engine.report import facts
from engine.report.boxes import boxes, shown_ranks
from engine.report.curves import loss_picture, throughput_picture
from engine.report.data import RunData
from engine.report.page import Figure, Page, Table
from engine.report.timeline import some_ranks, timeline_picture


def run_page(run: RunData) -> Page:
    """Return the page of a run, whole or stopped early."""
    table = facts.table(run)
    return Page(
        title=run.config.recipe,
        kind="a ByteScale run",
        head=facts.head(run),
        figures=[_loss(run), _timeline(run), _throughput(run)],
        tables=[Table("The run in numbers", table)] if table else [],
        warning=facts.warning(run),
    )


def _loss(run: RunData) -> Figure:
    if not run.lines:
        return Figure("Loss", "No step has finished, so there is no loss to show.")
    steps, loss, validation = (run.column(name) for name in ("step", "loss", "validation_loss"))
    caption = (
        "The mean loss of each step's tokens; the dashed line is the bigram entropy of the corpus, "
        "the least that a model could reach which sees only the token before."
    )
    return Figure.of("Loss", caption, lambda size: loss_picture(steps, loss, validation, run.bigram_nats, size))


def _timeline(run: RunData) -> Figure:
    trace = run.trace
    if trace is None:
        return Figure("Timeline of a step", "The run stopped before it had measured a whole step, so none is shown.")
    caption = (
        f"Step {trace.step:,} as it was measured: each box is one micro-batch, forward and backward, with its ring "
        "size and its rank's tokens (K = 1,024) where they fit, and boxes that touch from row to row share rings."
    )
    found = boxes(trace.plan, trace.spans, shown_ranks(trace.plan.ranks))
    caption += some_ranks(found)
    return Figure.of("Timeline of a step", caption, lambda size: timeline_picture(found, size))


def _throughput(run: RunData) -> Figure:
    if not run.lines:
        return Figure("Throughput", "No step has finished, so there is no throughput to show.")
    steps, rate = run.column("step"), run.column("tokens_per_s")
    caption = "Tokens of each step over its seconds, all ranks together, waits included and validation left out."
    return Figure.of("Throughput", caption, lambda size: throughput_picture(steps, rate, size))
