"""Bars that lie, a row a simulated run: speed-ups, and where the time of a step goes. Numbers in, SVG text out."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes

from engine.report.svg import FIRST, INK, QUIET, SECOND, WIDE, Size, Words, draw
from engine.report.words import short_seconds

Run = Mapping[str, Any]  # as `simulate --json` has it
ROW = 24.0  # pixels
_THIRD = "#009e73"
_LETTER = 0.62  # of a font's size: the width of a letter


def speedup_picture(runs: Sequence[Run], size: Size = WIDE) -> str:
    """Return how many times faster than `static` of its sweep point each run is."""

    def paint(axes: Axes, rows: Sequence[int]) -> None:
        ratios = [run["speedup"] for run in runs]
        axes.barh(rows, ratios, height=0.7, color=[QUIET if run["planner"] == "static" else FIRST for run in runs])
        axes.vlines(
            [1.0] * len(rows), [row - 0.5 for row in rows], [row + 0.5 for row in rows], color=INK, linewidth=1.0
        )
        write_ends(axes, rows, ratios, [f"{ratio:.2f}" for ratio in ratios], size)
        axes.set_xlabel("speed-up against static")

    best = max(runs, key=lambda run: float(run["speedup"]))
    told = f"The best is {best['planner']} at {best['speedup']:.2f} times the speed of static."
    return _draw(Words("speedup", "Speed-up of each planner", told), runs, size, paint)


def seconds_picture(runs: Sequence[Run], size: Size = WIDE) -> str:
    """Return the seconds of a step of each run, a mean over ranks: computing, transfers, idle, the step's end."""

    def paint(axes: Axes, rows: Sequence[int]) -> None:
        left = [0.0] * len(runs)
        for label, colour, hatch in _PARTS:
            widths = [parts(run)[label] for run in runs]
            axes.barh(
                rows, widths, left=left, height=0.7, label=label, color=colour, hatch=hatch, edgecolor=INK, linewidth=0
            )
            left = [start + width for start, width in zip(left, widths, strict=True)]
        write_ends(axes, rows, left, [short_seconds(run["step_s"]) for run in runs], size)
        axes.set_xlabel("seconds of a step, mean over ranks")

    told = "; ".join(f"{run['planner']} {short_seconds(run['step_s'])}" for run in runs)
    return _draw(Words("seconds", "Where the time of a step goes", f"{told}."), runs, size, paint)


_PARTS = (
    ("computes", FIRST, ""),
    ("waits for transfers", SECOND, "////"),
    ("gradients and update", _THIRD, ""),
    ("idle", QUIET, ""),
)


def parts(run: Run) -> dict[str, float]:
    """Return the seconds of a run's step by what its ranks do; they add up to the step."""
    idle = run["bubble"] * run["step_s"]
    known = {"computes": run["compute_s"], "waits for transfers": run["exposed_comm_s"], "idle": idle}
    return known | {"gradients and update": max(0.0, run["step_s"] - sum(known.values()))}


def _draw(words: Words, runs: Sequence[Run], size: Size, paint: Callable[[Axes, Sequence[int]], None]) -> str:
    """Return a picture of a row a run, those of a sweep point below its name."""
    letters = int((size.width - 110) / (_LETTER * size.font))
    headers, rows, row = {}, [], 0
    for sweep, group in groupby(runs, key=lambda run: str(run.get("sweep", ""))):
        for line in textwrap.wrap(sweep, letters):
            headers[row] = line
            row += 1
        for _ in group:
            rows.append(row)
            row += 1

    def painted(axes: Axes) -> None:
        paint(axes, rows)
        for at, text in headers.items():
            axes.text(0.01, at, text, transform=axes.get_yaxis_transform(), va="center", weight="bold")
        axes.set_yticks(rows, [run["planner"] for run in runs])
        axes.set_ylim(row - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")

    return draw(words, size, ROW * row + 80, painted)


def write_ends(axes: Axes, rows: Sequence[int], ends: Sequence[float], texts: Sequence[str], size: Size) -> None:
    """Write each bar's text behind its end, and leave room for the longest."""
    room = (max(map(len, texts)) + 1.5) * _LETTER * size.font / (size.width - 110)
    axes.set_xlim(0, max(ends) / (1 - room))
    for row, end, text in zip(rows, ends, texts, strict=True):
        axes.annotate(text, (end, row), xytext=(4, 0), textcoords="offset points", va="center", color=INK)
