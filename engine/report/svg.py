"""A matplotlib figure as SVG text that sits well in a page: named, scalable, in the page's colours, reproducible."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Size:
    """A width to draw for, in CSS pixels, and its font size: a picture is drawn anew for a phone, not shrunk."""

    name: str
    width: int
    font: int


WIDE = Size("wide", 960, 13)
NARROW = Size("narrow", 400, 12)


@dataclass(frozen=True)
class Words:
    """What a reader who does not see the picture gets. `key` starts the ids of its elements; unique in the page."""

    key: str
    title: str
    description: str


# Colours that the page chooses, for light and for dark. matplotlib knows no CSS, so it draws with these stand-ins.
INK, GRID, QUIET, PAPER = "#010203", "#040506", "#070809", "#0a0b0c"
FIRST, SECOND = "#0d0e0f", "#101112"  # of curves
_CSS = {
    INK: "currentColor",
    GRID: "var(--grid, #d9dde3)",
    QUIET: "var(--quiet, #c3c9d2)",
    PAPER: "var(--paper, #ffffff)",
    FIRST: "var(--first, #0072b2)",
    SECOND: "var(--second, #d55e00)",
}
# Okabe and Ito's colours that stand out from white and from black, for ring sizes; the ink is what is read on each.
RINGS = (
    ("#0072b2", "white"),
    ("#e69f00", "black"),
    ("#009e73", "black"),
    ("#cc79a7", "black"),
    ("#56b4e9", "black"),
    ("#d55e00", "black"),
)
_LINE = 1.6  # of a font's size: a row of a legend
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # they would name the day, and load nothing

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: it can be searched, selected and read aloud
    "svg.hashsalt": "bytescale",  # ids are random without it
    "figure.constrained_layout.use": True,
    "savefig.transparent": True,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.borderpad": 0.0,
    "lines.linewidth": 1.8,
}


def draw(words: Words, size: Size, height: float, paint: Callable[[Axes], None]) -> str:
    """Return what `paint` draws on a pair of axes as an `<svg>` element that scales with its place.

    It is `height` pixels high, and a legend's second and further rows beside. The same input gives the same text,
    whatever the user's own matplotlib settings are.
    """
    with style.context(["default", _STYLE | {"font.size": size.font}]):
        figure = Figure(figsize=(size.width / 72, height / 72), dpi=72)  # so that a point is a pixel
        axes = figure.add_subplot()
        paint(axes)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            rows = _legend_rows(labels, size)
            columns = math.ceil(len(labels) / rows)
            figure.legend(handles, labels, loc="outside upper left", ncols=columns)
            figure.set_figheight((height + (rows - 1) * _LINE * size.font) / 72)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=_NO_METADATA)
    return _for_page(buffer.getvalue(), f"{words.key}-{size.name}", words)


def _legend_rows(labels: list[str], size: Size) -> int:
    """Return in how many rows a legend fits the picture."""
    entry = size.font * (0.56 * max(map(len, labels)) + 4.5)  # a letter's width, and the sign before the text
    return math.ceil(len(labels) / max(1, int(size.width / entry)))


def _for_page(svg: str, name: str, words: Words) -> str:
    """Return the element alone: no XML head, no fixed size, ids that no other picture has, colours of the page."""
    _, view_box, body = _parts(svg)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(url\(|href=")#', rf"\1#{name}-", body)
    for stand_in, css in _CSS.items():
        body = body.replace(stand_in, css)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {view_box} '
        f'role="img" aria-labelledby="{name}-title {name}-description">\n'
        f'<title id="{name}-title">{escape(words.title)}</title>\n'
        f'<desc id="{name}-description">{escape(words.description)}</desc>{body}'
    )


def _parts(svg: str) -> tuple[str, str, str]:
    """Return what precedes the `<svg>` tag, the tag's view box, and all that follows the tag."""
    match = re.search(r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", svg)
    assert match is not None, "matplotlib always writes a view box"
    return svg[: match.start()], match[1], svg[match.end() :]
