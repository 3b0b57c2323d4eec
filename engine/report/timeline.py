"""The timeline of a step: ranks down, time across, a box a micro-batch. Numbers in, SVG text out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from engine.config.units import counted
from engine.report.boxes import Bools, Boxes, Floats, degree_groups, group_name
from engine.report.svg import INK, PAPER, QUIET, RINGS, WIDE, Size, Words, draw
from engine.report.words import short_tokens

_LABEL_ROW = 14.0  # pixels: lower rows hold no readable label


def timeline_picture(found: Boxes, size: Size = WIDE, *, key: str = "timeline", until_s: float | None = None) -> str:
    """Return the boxes of a step. `key` is unique in its page; time ends at `until_s`, or with the step."""
    row = _row_height(len(found.ranks))
    kinds = _kinds(found)
    until = found.end_s if until_s is None else until_s

    def paint(axes: Axes) -> None:
        _name_axes(axes, found, until, row)
        busy_until = found.stop_s - found.exposed_s
        for kind in kinds:
            _fill(axes, found, kind, found.start_s, busy_until)
        waits = {"facecolor": "none", "edgecolor": INK, "hatch": "////", "linewidth": 0.5}
        waiting = _Kind("waits for transfers", found.exposed_s > 0.002 * until, waits, INK)
        if waiting.chosen.any():
            _fill(axes, found, waiting, busy_until, found.stop_s)
        _write_labels(axes, found, kinds, until, row, size)

    shown = "" if len(found.ranks) == found.all_ranks else f", of which {len(found.ranks)} are shown"
    told = f"{counted(found.all_ranks, 'rank')}{shown}; largest ring {max(1, int(found.degree.max(initial=1))):,}."
    words = Words(key, "Timeline of a step", told)
    return draw(words, size, row * len(found.ranks) + 90, paint)


def some_ranks(found: Boxes) -> str:
    """Return the sentence that says that not all ranks are shown, if so."""
    if len(found.ranks) == found.all_ranks:
        return ""
    return f" Of {found.all_ranks:,} ranks {len(found.ranks)} are shown, evenly chosen from the first to the last."


@dataclass(frozen=True, eq=False)
class _Kind:
    """Boxes that look alike: their name in the legend, which they are [M], how they look, and the ink on them."""

    name: str
    chosen: Bools
    look: dict[str, Any]
    ink: str


def _kinds(found: Boxes) -> list[_Kind]:
    """Return the kinds that occur. Idle boxes are hatched, so that they differ without any colour."""
    edge = {"edgecolor": PAPER, "linewidth": 1.0}
    kinds = [_Kind("whole sequences", found.degree == 1, edge | {"facecolor": QUIET}, INK)]
    for group, (colour, ink) in zip(degree_groups(found.degree), RINGS, strict=False):
        ours = (found.degree >= group.start) & (found.degree < group.stop)
        kinds.append(_Kind(group_name(group), ours, edge | {"facecolor": colour}, ink))
    idle = {"facecolor": "none", "edgecolor": QUIET, "hatch": "/////", "linewidth": 0.6}
    kinds.append(_Kind("idle", found.degree == 0, idle, INK))
    return [kind for kind in kinds if kind.chosen.any()]


def _fill(axes: Axes, found: Boxes, kind: _Kind, left: Floats, right: Floats) -> None:
    """Draw the chosen boxes from `left` to `right`, both [M], as one path: no seams, small pages.

    Rows leave a little space, but those of one gang touch: so one sees who shares a ring. Boxes of a few pixels have no
    edge, which would hide them.
    """
    a_pixel = axes.get_xlim()[1] / axes.figure.bbox.width
    thin = right - left < 4 * a_pixel
    low = found.row - np.where(found.above, 0.5, 0.4)
    high = found.row + np.where(found.below, 0.5, 0.4)
    corners = np.stack([left, low, right, low, right, high, left, high], axis=1).reshape(-1, 4, 2)
    label = kind.name
    for chosen, look in ((kind.chosen & ~thin, kind.look), (kind.chosen & thin, kind.look | {"linewidth": 0.0})):
        if chosen.any():
            path = Path.make_compound_path_from_polys(corners[chosen])
            axes.add_patch(PathPatch(path, label=label, **look))
            label = "_"  # the legend has it once


def _write_labels(axes: Axes, found: Boxes, kinds: list[_Kind], until: float, row: float, size: Size) -> None:
    """Write into each box the longest label that its solid part holds, if any."""
    if row < _LABEL_ROW:
        return
    font = min(size.font - 1, 0.55 * row)
    letters_a_second = (size.width - 80) / until / (0.62 * font)
    width = found.stop_s - found.exposed_s - found.start_s
    for kind in kinds:
        for at in np.flatnonzero(kind.chosen):
            holds = width[at] * letters_a_second - 1
            text = next((text for text in _labels(found, at) if len(text) <= holds), None)
            if text is not None:
                middle = found.start_s[at] + width[at] / 2
                axes.text(middle, found.row[at], text, color=kind.ink, size=font, ha="center", va="center_baseline")


def _labels(found: Boxes, at: np.intp) -> tuple[str, ...]:
    """Return what may stand in a box, the longest first."""
    degree, tokens = int(found.degree[at]), short_tokens(int(found.tokens[at]))
    if degree == 0:
        return ()
    if degree == 1:
        return (f"{tokens} tokens", tokens)
    return (f"ring of {degree} · {tokens} tokens", f"ring of {degree} · {tokens}", f"{degree} · {tokens}", str(degree))


def _name_axes(axes: Axes, found: Boxes, until: float, row: float) -> None:
    rows = len(found.ranks)
    axes.set(xlim=(0, until), ylim=(rows - 0.5, -0.5), ylabel="rank")  # the first rank is the top row
    axes.set_xlabel("seconds from the start of the step")
    axes.set_yticks(range(rows), [str(rank) for rank in found.ranks.tolist()])
    axes.tick_params(axis="y", labelsize=min(axes.yaxis.label.get_fontsize(), row))
    axes.grid(visible=False, axis="y")


def _row_height(rows: int) -> float:
    """Return the pixels of a row: high for a few, and never too low for its rank's number."""
    return min(44.0, max(11.0, 480 / rows))
