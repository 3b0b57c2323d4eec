"""Draws a chart with matplotlib as an SVG element for a page: scalable, reproducible, in CSS colours, with alt text."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure


@dataclass(frozen=True)
class Size:
    """Width and font size in CSS pixels. Pictures are drawn in two sizes: shrunk text would be hard to read.

    `values` is the number of places that show their values on hovering, in a picture with many.
    """

    name: str
    width: int
    font: int
    values: int


WIDE = Size("wide", 880, 13, 600)
NARROW = Size("narrow", 360, 12, 200)


class Mark(NamedTuple):
    """A rectangle of a chart, in the units of its axes, and the text that a browser shows over it."""

    left: float
    right: float
    low: float
    high: float
    text: str


@dataclass(frozen=True)
class AltText:
    """Title and description for screen readers. `key`, which must be unique in the page, is the prefix of all ids."""

    key: str
    title: str
    description: str


# Colours of pages and pictures, by the name of their CSS variable.
LIGHT = {
    "ink": "#1b2027",
    "soft": "#545d69",
    "paper": "#ffffff",
    "grid": "#e2e5ea",
    "quiet": "#8c94a0",
    "warn": "#a33b00",
    "first": "#0072b2",
    "second": "#d55e00",
}
DARK = {
    "ink": "#e8ebef",
    "soft": "#a4adb9",
    "paper": "#14171c",
    "grid": "#2c323b",
    "quiet": "#5f6a78",
    "warn": "#ff9d66",
    "first": "#56b4e9",
    "second": "#ff8c42",
}
# matplotlib cannot use CSS variables: it draws placeholders.
INK, GRID, QUIET, PAPER = "#010203", "#040506", "#070809", "#0a0b0c"
FIRST, SECOND = "#0d0e0f", "#101112"  # colours of curves
_CSS = {
    INK: "currentColor",
    GRID: "var(--grid)",
    QUIET: "var(--quiet)",
    PAPER: "var(--paper)",
    FIRST: "var(--first)",
    SECOND: "var(--second)",
}
# Colours of ring sizes: those of Okabe and Ito, three of them darker, so that each has a contrast of 3 with light and
# with dark pages. The second is the text colour on the first.
RINGS = (
    ("#0072b2", "white"),
    ("#c98500", "black"),
    ("#009e73", "black"),
    ("#c2689a", "black"),
    ("#3a94cc", "black"),
    ("#d55e00", "black"),
)
_LINE = 1.6  # height of a row of a legend, relative to the font size
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # the date would differ between runs

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",  # keep text as text: searchable, selectable, readable by screen readers
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],  # matplotlib's list is longer, and in each text
    "svg.hashsalt": "bytescale",  # without it, ids are random
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.parse_math": False,  # a $ in a name does not begin a formula
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


def palette() -> str:
    """Return the CSS that sets the colours, also for readers who prefer dark ones. Print is light."""
    light, dark = (" ".join(f"--{name}: {colour};" for name, colour in each.items()) for each in (LIGHT, DARK))
    return f":root {{ {light} }} @media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"


def draw(alt: AltText, size: Size, height: float, paint: Callable[[Axes], Sequence[Mark]]) -> str:
    """Draw a chart and return it as an `<svg>` element that scales to the width of its parent.

    `paint` draws on matplotlib axes, and returns texts that a browser shows when hovering over places of the chart. The
    picture is `height` pixels high, plus any further rows of its legend. The same input gives the same text, whatever
    the user's matplotlib settings are.
    """
    with style.context(["default", _STYLE | {"font.size": size.font}]):
        figure = Figure(figsize=(size.width / 72, height / 72), dpi=72)  # one point is one pixel
        axes = figure.add_subplot()
        marks = paint(axes)
        # The legend lies above the axes and may need several rows. Each further row makes the picture higher, so that
        # the axes keep their height.
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            entry = size.font * (0.56 * max(map(len, labels)) + 4.2)  # width of the letters and of the symbol
            rows = math.ceil(len(labels) / max(1, int(size.width / entry)))
            columns = math.ceil(len(labels) / rows)
            figure.legend(handles, labels, loc="outside upper left", ncols=columns)
            figure.set_figheight((height + (rows - 1) * _LINE * size.font) / 72)
        buffer = io.StringIO()
        # Not savefig, which draws everything twice where a layout is constrained; the layout is the same.
        FigureCanvasSVG(figure).print_svg(buffer, metadata=_NO_METADATA)
        titles = _titles(axes, marks)

    # matplotlib writes a whole file. The page needs the element only, with unique ids and with colours from CSS.
    svg, name = buffer.getvalue(), f"{alt.key}-{size.name}"
    match = re.search(r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", svg)
    assert match is not None, "matplotlib always writes a view box"
    view_box, body = match[1], svg[match.end() :]
    body = body[: body.rindex("</svg>")]
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(url\(|href=")#', rf"\1#{name}-", body)
    for stand_in, css in _CSS.items():
        body = body.replace(stand_in, css)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" {view_box} '
        f'role="img" aria-labelledby="{name}-title {name}-description">\n'
        f'<title id="{name}-title">{escape(alt.title)}</title>\n'
        f'<desc id="{name}-description">{escape(alt.description)}</desc>{body}{titles}</svg>\n'
    )


def _titles(axes: Axes, marks: Sequence[Mark]) -> str:
    """Return invisible rectangles over the marks, which are inside the axes, with their texts as titles."""
    corners = np.array([[(one.left, one.low), (one.right, one.high)] for one in marks], dtype=np.float64)
    low, high = axes.bbox.min, axes.bbox.max
    places = axes.transData.transform(corners.reshape(-1, 2)).reshape(-1, 2, 2).clip(low, high)
    height = axes.figure.bbox.height
    found = []
    for ends, one in zip(places, marks, strict=True):
        (left, bottom), (right, top) = ends.min(axis=0), ends.max(axis=0)
        place = f'x="{left:.1f}" y="{height - top:.1f}" width="{right - left:.1f}" height="{top - bottom:.1f}"'
        found.append(f"<rect {place}><title>{escape(one.text)}</title></rect>")
    return f'<g fill="none" pointer-events="all">{"".join(found)}</g>' if found else ""
