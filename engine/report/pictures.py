"""The pictures of a report: numbers in, SVG text out. Nothing is read and nothing is kept.

Letters: N steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from numpy.typing import NDArray

from engine.planner.plan import StepPlan
from engine.report.boxes import Bools, Boxes, Span, boxes, degree_groups, label_ranks, short_tokens
from engine.report.svg import FIRST, INK, PAPER, QUIET, SECOND, WIDE, Size, Words, draw

Floats = NDArray[np.float64]

# Okabe and Ito's colours that also stand out from white and from black; the ink is what is read on each.
RINGS = (
    ("#0072b2", "white"),
    ("#e69f00", "black"),
    ("#009e73", "black"),
    ("#cc79a7", "black"),
    ("#56b4e9", "black"),
    ("#d55e00", "black"),
)
_MANY = 500  # steps that need thin lines
_LABEL_ROW = 14.0  # pixels: lower rows hold no readable label


def loss_picture(steps: Floats, loss: Floats, validation: Floats, bigram_nats: float, size: Size = WIDE) -> str:
    """Return the loss curves over `steps` [N], in nats a token.

    `validation` [N] is NaN where none was made. What is not finite leaves a gap; a bigram entropy of NaN has no line.
    """
    loss, validation = _finite(loss), _finite(validation)
    measured = np.isfinite(validation)

    def paint(axes: Axes) -> None:
        axes.plot(steps, loss, color=FIRST, label="training", **_curve(steps))
        if measured.any():
            dots: dict[str, Any] = {"marker": "o", "markersize": 5, "linewidth": 1}
            axes.plot(steps[measured], validation[measured], color=SECOND, label="validation", **dots)
        if np.isfinite(bigram_nats):
            name = f"bigram entropy, {bigram_nats:.2f}"
            axes.axhline(bigram_nats, color=INK, linestyle="--", linewidth=1.2, label=name)
        axes.set_ylabel("loss (nats a token)")
        _step_axis(axes, steps)

    told = f"Training loss: {_first_and_last(loss)}. Validation loss: {_first_and_last(validation)}."
    words = Words("loss", "Loss of each step", f"{told} Bigram entropy of the corpus: {bigram_nats:.3f}.")
    return draw(words, size, _curve_height(size), paint)


def throughput_picture(steps: Floats, tokens_per_s: Floats, size: Size = WIDE) -> str:
    """Return the tokens a second of `steps` [N], over all ranks, with a running median."""
    rate = _finite(tokens_per_s)
    kept = np.isfinite(rate)

    def paint(axes: Axes) -> None:
        dots: dict[str, Any] = (
            {"linestyle": "", "marker": "o", "markersize": 3.5} if len(steps) < _MANY else {"linewidth": 0.8}
        )
        axes.plot(steps, rate, color=FIRST, alpha=0.6, label="one step", **dots)
        axes.plot(steps[kept], running_median(rate[kept]), color=SECOND, linewidth=2.2, label="running median")
        axes.set(ylabel="throughput (tokens/s)", ylim=(0, 1.08 * rate[kept].max(initial=1.0)))
        _step_axis(axes, steps)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))

    told = f"Median {np.median(rate[kept]):,.0f} tokens a second." if kept.any() else "No step was measured."
    return draw(Words("throughput", "Tokens a second of each step", told), size, _curve_height(size), paint)


def timeline_picture(plan: StepPlan, spans: Sequence[Span], size: Size = WIDE) -> str:
    """Return the measured step: ranks down, time across, a box a micro-batch. The spans are those of the plan."""
    found = boxes(plan, spans)
    row = _row_height(plan.ranks)
    kinds = _kinds(found, row)

    def paint(axes: Axes) -> None:
        for kind in kinds:
            boxes_of_kind = Path.make_compound_path_from_polys(_corners(found, kind.chosen, row))
            axes.add_patch(PathPatch(boxes_of_kind, label=kind.name, **kind.look))  # one path: no seams, small pages
        _write_labels(axes, found, kinds, row, size)
        _name_axes(axes, found, plan.ranks, row)

    told = f"{plan.ranks} ranks, {len(spans)} micro-batches, largest ring {max(1, int(found.degree.max(initial=1)))}."
    words = Words("timeline", "Timeline of a step", told)
    return draw(words, size, row * plan.ranks + 90, paint)


def running_median(values: Floats) -> Floats:
    """Return the median of the values around each, [N]; the window is a tenth of them, from 5 to 51."""
    half = min(25, max(2, len(values) // 20))
    return np.array([np.median(values[max(0, at - half) : at + half + 1]) for at in range(len(values))])


@dataclass(frozen=True, eq=False)
class _Kind:
    """Boxes that look alike: their name in the legend, which they are [M], how they look, and the ink on them."""

    name: str
    chosen: Bools
    look: dict[str, Any]
    ink: str


def _kinds(found: Boxes, row: float) -> list[_Kind]:
    """Return the kinds that occur. Idle boxes are hatched, so that they differ without any colour."""
    edge = {"edgecolor": PAPER, "linewidth": 1.0 if row >= 8 else 0.0}
    kinds = [_Kind("whole sequences", found.degree == 1, edge | {"facecolor": QUIET}, INK)]
    for group, (colour, ink) in zip(degree_groups(found.degree), RINGS, strict=False):
        ours = (found.degree >= group.start) & (found.degree < group.stop)
        kinds.append(_Kind(_group_name(group), ours, edge | {"facecolor": colour}, ink))
    idle = {"facecolor": "none", "edgecolor": QUIET, "hatch": "/////", "linewidth": 0.6}
    kinds.append(_Kind("idle", found.degree == 0, idle, INK))
    return [kind for kind in kinds if kind.chosen.any()]


def _group_name(group: range) -> str:
    return f"ring of {group[0]}" if len(group) == 1 else f"rings of {group[0]} to {group[-1]}"


def _corners(found: Boxes, chosen: Bools, row: float) -> Floats:
    """Return the corners of the chosen boxes, [boxes, 4, 2].

    Rows leave a little space while they are high enough, but those of one gang touch: so one sees who shares a ring.
    """
    half = 0.4 if row >= 8 else 0.5
    left, right = found.start_s[chosen], found.stop_s[chosen]
    low = found.rank[chosen] - np.where(found.above[chosen], 0.5, half)
    high = found.rank[chosen] + np.where(found.below[chosen], 0.5, half)
    return np.stack([left, low, right, low, right, high, left, high], axis=1).reshape(-1, 4, 2)


def _write_labels(axes: Axes, found: Boxes, kinds: list[_Kind], row: float, size: Size) -> None:
    """Write into each box the longest label that it holds, if any."""
    if row < _LABEL_ROW:
        return
    font = min(size.font - 1, 0.55 * row)
    letters_a_second = (size.width - 80) / found.stop_s.max() / (0.62 * font)
    for kind in kinds:
        for at in np.flatnonzero(kind.chosen):
            holds = (found.stop_s[at] - found.start_s[at]) * letters_a_second - 1
            text = next((text for text in _labels(found, at) if len(text) <= holds), None)
            if text is not None:
                middle = (found.start_s[at] + found.stop_s[at]) / 2
                axes.text(middle, found.rank[at], text, color=kind.ink, size=font, ha="center", va="center_baseline")


def _labels(found: Boxes, at: np.intp) -> tuple[str, ...]:
    """Return what may stand in a box, the longest first."""
    degree, tokens = int(found.degree[at]), short_tokens(int(found.tokens[at]))
    if degree == 0:
        return ()
    if degree == 1:
        return (f"{tokens} tokens", tokens)
    return (f"ring of {degree} · {tokens} tokens", f"ring of {degree} · {tokens}", f"{degree} · {tokens}", str(degree))


def _name_axes(axes: Axes, found: Boxes, ranks: int, row: float) -> None:
    axes.set(xlim=(0, found.stop_s.max()), ylim=(ranks - 0.5, -0.5), ylabel="rank")  # rank 0 is the top row
    axes.set_xlabel("seconds from the start of the step")
    axes.set_yticks(label_ranks(ranks))
    if ranks <= 64:
        axes.tick_params(axis="y", labelsize=min(axes.yaxis.label.get_fontsize(), row))
    axes.grid(visible=False, axis="y")


def _row_height(ranks: int) -> float:
    """Return the pixels of a rank's row: high for a few, all labels legible up to 64, then a fixed sum."""
    return min(44.0, max(11.0, 480 / ranks)) if ranks <= 64 else 704 / ranks


def _step_axis(axes: Axes, steps: Floats) -> None:
    """Name the axis of steps, whole numbers, with room for a single one."""
    room = max(0.5, 0.02 * np.ptp(steps))
    axes.set(xlabel="step", xlim=(steps.min() - room, steps.max() + room))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def _curve_height(size: Size) -> float:
    return 0.36 * size.width if size is WIDE else 0.72 * size.width


def _finite(values: Floats) -> Floats:
    """Return the values with a gap (NaN) where one is infinite: an axis cannot reach it."""
    return np.where(np.isfinite(values), values, np.nan)


def _first_and_last(values: Floats) -> str:
    kept = values[np.isfinite(values)]
    return f"from {kept[0]:.3f} to {kept[-1]:.3f}" if len(kept) else "none"


def _curve(steps: Floats) -> dict[str, Any]:
    """Return the look of a curve: dots where a line would hardly show, a thin line where a thick one would blur."""
    if len(steps) < 10:
        return {"marker": "o", "markersize": 4}
    return {"linewidth": 1.8 if len(steps) < _MANY else 0.9}
