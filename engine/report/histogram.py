"""How long sequences are: their share in each bucket of lengths, by number and by tokens. Numbers in, SVG text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from engine.report.svg import FIRST, INK, SECOND, WIDE, Size, Words, draw
from engine.report.words import short_tokens

_LINES = (":", "-.", "--", "-")  # of marks, in their order
_LEAST = 6  # doublings that are shown: one bucket alone would be a wall
_TICK = 5.5  # letters of a tick's label, with the space beside it: 512K


def histogram_picture(
    buckets: Sequence[Mapping[str, int]], marks: Mapping[str, int], name: str = "sequences", size: Size = WIDE
) -> str:
    """Return two bars a bucket, in percent of all `name` and of all tokens; `marks` are up to four named lengths.

    Buckets are those of engine/data/profile.py: `samples` and `tokens` of lengths above the one before, up to `upto`.
    """
    edge = np.log2([bucket["upto"] for bucket in buckets])

    def paint(axes: Axes) -> None:
        for kind, left, colour, label in (
            ("samples", 0.92, FIRST, f"share of {name}"),
            ("tokens", 0.50, SECOND, "share of tokens"),
        ):
            counts = np.array([bucket[kind] for bucket in buckets], dtype=np.float64)
            axes.bar(edge - left, 100 * counts / counts.sum(), width=0.42, align="edge", color=colour, label=label)
        for style, (mark, length) in zip(_LINES, marks.items(), strict=False):
            axes.axvline(
                np.log2(length), color=INK, linestyle=style, linewidth=1.4, label=f"{mark} {short_tokens(length)}"
            )
        _name_axes(axes, edge, max([edge[-1], *np.log2(list(marks.values()))]), size)

    told = ", ".join(f"{mark} {length:,}" for mark, length in marks.items())
    words = Words("lengths", "Lengths by number and by tokens", f"Lengths in tokens: {told}.")
    return draw(words, size, 0.4 * size.width if size is WIDE else 0.95 * size.width, paint)


def _name_axes(axes: Axes, edge: np.ndarray, last: float, size: Size) -> None:
    first = max(-1.1, min(edge[0] - 1.1, last - _LEAST))
    axes.set(xlabel="length (tokens, K = 1,024)", ylabel="share (%)", xlim=(first, last + 0.3))
    every = int(np.ceil((last + 0.3 - first) * _TICK * size.font * 0.62 / (size.width - 80)))
    axes.set_xticks(np.arange(edge[-1], max(first, -0.1), -every))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda power, _: short_tokens(2.0**power)))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.grid(visible=False, axis="x")
