"""The page: pictures with their sentences, the head and the table, put into page.html."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from engine.report import facts
from engine.report.data import RunData
from engine.report.pictures import loss_picture, throughput_picture, timeline_picture
from engine.report.svg import NARROW, WIDE, Size


@dataclass(frozen=True)
class Figure:
    """A picture as SVG, for a wide page and for a narrow one, with its sentence; undrawn, the sentence says why."""

    title: str
    caption: str
    wide: str = ""
    narrow: str = ""

    @classmethod
    def of(cls, title: str, caption: str, picture: Callable[[Size], str]) -> Figure:
        """Return the figure of a picture that can be drawn in any size."""
        return cls(title, caption, picture(WIDE), picture(NARROW))


def render(run: RunData) -> str:
    """Return the page of a run, as HTML."""
    template = files("engine.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(template).render(
        recipe=run.config.recipe,
        head=facts.head(run),
        warning=facts.warning(run),
        figures=[_loss(run), _timeline(run), _throughput(run)],
        table=facts.table(run),
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
        "size and its rank's tokens (K = 1,024) where they fit, and boxes that touch from rank to rank share rings."
    )
    return Figure.of("Timeline of a step", caption, lambda size: timeline_picture(trace.plan, trace.spans, size))


def _throughput(run: RunData) -> Figure:
    if not run.lines:
        return Figure("Throughput", "No step has finished, so there is no throughput to show.")
    steps, rate = run.column("step"), run.column("tokens_per_s")
    caption = "Tokens of each step over its seconds, all ranks together, waits included and validation left out."
    return Figure.of("Throughput", caption, lambda size: throughput_picture(steps, rate, size))
