"""Draws the timeline of a step: a row per rank, time from left to right, a box per micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from engine.config.units import counted
from engine.report.boxes import Boxes, degree_groups, group_name
from engine.report.svg import INK, PAPER, QUIET, RINGS, WIDE, AltText, Mark, Size, draw
from engine.report.words import short_seconds, short_tokens
from engine.units import Bools, Floats

_LABEL_ROW = 14.0  # pixels; labels in lower rows would be illegible


def timeline_picture(
    found: Boxes,
    size: Size = WIDE,
    *,
    key: str = "timeline",
    until_s: float | None = None,
    groups: Sequence[range] = (),
    height: float = 480.0,
) -> str:
    """Draw the boxes of a step and return an `<svg>` element.

    `key` must be unique in the page. The time axis ends at `until_s`, by default at the end of the step. `groups` are
    ranges of ring degrees, each with a colour, by default those of the step (`degree_groups`). The rows are
    `height` pixels high together, if each can then have the size of its number.
    """
    rows = len(found.ranks) * found.stages
    row = min(44.0, max(11.0, height / rows))  # pixels: high for few ranks, but never too low for the rank's number
    # Colours show ring sizes. Unsplit sequences are grey, so that rings stand out.
    edge = {"edgecolor": PAPER, "linewidth": 1.0}
    kinds = [_Kind("unsplit sequences", found.degree == 1, edge | {"facecolor": QUIET}, INK)]
    for group, (colour, ink) in zip(groups or degree_groups(found.degree), RINGS, strict=False):
        ours = (found.degree >= group.start) & (found.degree < group.stop)
        kinds.append(_Kind(group_name(group), ours, edge | {"facecolor": colour}, ink))
    # Hatching makes idle boxes recognisable without colours.
    idle = {"facecolor": "none", "edgecolor": QUIET, "hatch": "/////", "linewidth": 0.6}
    kinds.append(_Kind("idle", found.degree == 0, idle, INK))
    kinds = [kind for kind in kinds if kind.chosen.any()]
    until = found.end_s if until_s is None else until_s

    def paint(axes: Axes) -> list[Mark]:
        axes.set(xlim=(0, until), ylim=(rows - 0.5, -0.5), ylabel="rank")  # the first row is at the top
        axes.set_xlabel("seconds from the start of the step")
        of_stage = [f"stage {stage}, rank " if found.stages > 1 else "" for stage in range(found.stages)]
        axes.set_yticks(range(rows), [f"{stage}{rank}" for stage in of_stage for rank in found.ranks.tolist()])
        axes.tick_params(axis="y", labelsize=min(axes.yaxis.label.get_fontsize(), row))
        axes.grid(visible=False, axis="y")
        # Waiting is drawn over the end of the box: hatched, and only where it is long enough to be seen.
        busy_until = found.stop_s - found.exposed_s
        for kind in kinds:
            _fill(axes, found, kind, found.start_s, busy_until)
        waits = {"facecolor": "none", "edgecolor": INK, "hatch": "////", "linewidth": 0.5}
        waiting = _Kind("waits for transfers", found.exposed_s > 0.002 * until, waits, INK)
        if waiting.chosen.any():
            _fill(axes, found, waiting, busy_until, found.stop_s)
        _write_labels(axes, found, kinds, until, row, size)
        return _marks(found, size.values)

    shown = "" if len(found.ranks) == found.all_ranks else f", of which {len(found.ranks)} are shown"
    summary = f"{counted(found.all_ranks, 'rank')}{shown}; largest ring {max(1, int(found.degree.max(initial=1))):,}."
    return draw(AltText(key, "Timeline of a step", summary), size, row * rows + 90, paint)


def _marks(found: Boxes, most: int) -> list[Mark]:
    """The values of the boxes that take longest, at most `most`."""
    marks, rows = [], len(found.ranks)
    for at in np.sort(np.argsort(found.start_s - found.stop_s, kind="stable")[:most]).tolist():
        stage, row, degree = int(found.row[at]) // rows, int(found.row[at]), int(found.degree[at])
        where = f"stage {stage}, " if found.stages > 1 else ""
        what = {0: "idle", 1: "unsplit sequences"}.get(degree, f"ring of {degree}")
        text = f"{where}rank {found.ranks[row % rows]}: {what}, {found.tokens[at]:,} tokens, "
        text += f"{short_seconds(found.stop_s[at] - found.start_s[at])} from {short_seconds(found.start_s[at])}"
        if found.exposed_s[at] > 0:
            text += f", waits for transfers for {short_seconds(found.exposed_s[at])}"
        marks.append(Mark(found.start_s[at], found.stop_s[at], row - 0.5, row + 0.5, text))
    return marks


def some_ranks(found: Boxes) -> str:
    """A sentence for the caption if the timeline shows only some of the ranks, else an empty string."""
    if len(found.ranks) == found.all_ranks:
        return ""
    return f" Of {found.all_ranks:,} ranks, {len(found.ranks)} are shown, evenly spaced from the first to the last."


@dataclass(frozen=True, eq=False)
class _Kind:
    """Boxes that look alike: legend label, mask [M] of the boxes, matplotlib style, and colour of the text on them."""

    name: str
    chosen: Bools
    look: dict[str, Any]
    ink: str


def _fill(axes: Axes, found: Boxes, kind: _Kind, left: Floats, right: Floats) -> None:
    """Draw the boxes of a kind from `left` to `right`, both [M], as one path, which keeps the page small.

    A small gap separates rows, but not boxes of one gang: these touch, to show which ranks share a ring.
    """
    a_pixel = axes.get_xlim()[1] / axes.figure.bbox.width
    thin = right - left < 4 * a_pixel  # drawn without edges, which would cover them
    low = found.row - np.where(found.above, 0.5, 0.4)
    high = found.row + np.where(found.below, 0.5, 0.4)
    corners = np.stack([left, low, right, low, right, high, left, high], axis=1).reshape(-1, 4, 2)
    label = kind.name
    for chosen, look in ((kind.chosen & ~thin, kind.look), (kind.chosen & thin, kind.look | {"linewidth": 0.0})):
        if chosen.any():
            path = Path.make_compound_path_from_polys(corners[chosen])
            axes.add_patch(PathPatch(path, label=label, **look))
            label = "_"  # only once in the legend


def _write_labels(axes: Axes, found: Boxes, kinds: list[_Kind], until: float, row: float, size: Size) -> None:
    """Write the longest label that fits into each box, left of its hatched end; boxes that are too small get none."""
    if row < _LABEL_ROW:
        return
    font = min(size.font - 1, 0.55 * row)
    letters_per_second = (size.width - 80) / until / (0.62 * font)
    width = found.stop_s - found.exposed_s - found.start_s
    for kind in kinds:
        for at in np.flatnonzero(kind.chosen):
            degree, tokens = int(found.degree[at]), short_tokens(int(found.tokens[at]))
            if degree == 0:
                continue  # an idle box has no label
            labels = [f"{tokens} tokens", tokens]  # longest first
            if degree > 1:
                ring = f"ring of {degree} · {tokens}"
                labels = [f"{ring} tokens", ring, f"{degree} · {tokens}", str(degree)]
            most = width[at] * letters_per_second - 1
            text = next((text for text in labels if len(text) <= most), None)
            if text is not None:
                middle = found.start_s[at] + width[at] / 2
                axes.text(middle, found.row[at], text, color=kind.ink, size=font, ha="center", va="center_baseline")
