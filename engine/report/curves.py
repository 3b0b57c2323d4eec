"""Curves of one or more runs over steps or tokens: numbers in, SVG text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from engine.report.charts import half_window, running_median, strips
from engine.report.svg import FIRST, SECOND, WIDE, AltText, Mark, Size, draw
from engine.units import Floats

_MANY = 500  # from this many points on, a noisy curve is thin
_WIDER, _MOST_WIDER = 3.0, 2  # points by which a curve is wider than the next one, as often as this
_FEW = 10  # below, its points are marked: a line would hardly show
# The first two are darker on light pages; the others are visible on both.
COLOURS = (FIRST, SECOND, "#009e73", "#b8609a")
_STYLES = ("-", "--", ":", "-.")  # with the colours, these distinguish 16 runs


@dataclass(frozen=True, eq=False)
class Curve:
    """Values of a run, [N], at the places `x`, [N]. Values that are not finite leave a gap."""

    name: str
    x: Floats
    y: Floats
    is_smooth: bool = False


def smooth(curves: Sequence[Curve]) -> list[Curve]:
    """Return curves of running medians, without the gaps: noise hides how runs differ.

    Curves with equal values have equal medians: all have the same windows, and no window extends past a place where one
    of the curves begins or ends. Windows become smaller on both sides of such a place, so a steep curve has no step
    there.
    """
    found = [(one.name, one.x[kept], one.y[kept]) for one in curves for kept in [np.isfinite(one.y)]]
    half = half_window(max(len(x) for _, x, _ in found))
    edges = np.unique([x[at] for _, x, _ in found if len(x) for at in (0, -1)])
    smoothed = list[Curve]()
    for name, x, y in found:
        from_edges = np.abs(np.arange(len(x))[:, None] - np.searchsorted(x, edges))  # [N, edges], in values
        halves = np.minimum(from_edges.min(axis=1, initial=half), half)
        smoothed.append(Curve(name, x, running_median(y, halves), True))
    return smoothed


class Along(NamedTuple):
    """What an x axis shows: its key, its label, the unit of that label, and the format of a place on it."""

    key: str
    label: str
    unit: float = 1.0
    place: str = "step {:,.0f}"


STEPS = Along("step", "step")


def token_axis(most: float) -> Along:
    """An axis of tokens, up to `most`."""
    units = ((2.0**40, "T = 2^40"), (2.0**30, "G = 2^30"), (2.0**20, "M = 2^20"), (2.0**10, "K = 2^10"))
    unit, name = next(((unit, f"tokens ({name})") for unit, name in units if most >= 3 * unit), (1.0, "tokens"))
    return Along("tokens", name, unit, "{:,.0f} tokens")


def curves_picture(
    key: str,
    title: str,
    curves: Sequence[Curve],
    along: Along,
    label: str,
    size: Size = WIDE,
    *,
    log: bool = False,
    from_zero: bool = False,
) -> str:
    """Draw curves over one axis. A single one has no legend. `key` must be unique in the page.

    Later curves are thinner than earlier ones, so that curves with the same values stay visible.
    """

    def paint(axes: Axes) -> list[Mark]:
        for number, curve in enumerate(curves):
            # A noisy curve of many points would fill the chart, and a curve of few points would hardly show.
            width = 0.9 if len(curve.x) >= _MANY and not curve.is_smooth else 1.8
            look: dict[str, Any] = {"linewidth": width + _WIDER * min(_MOST_WIDER, len(curves) - 1 - number)}
            if len(curve.x) < _FEW:
                look |= {"marker": "o", "markersize": 4}
            colour = COLOURS[number % len(COLOURS)]
            if len(curves) > 1:
                look["label"] = curve.name
            style = _STYLES[number // len(COLOURS) % len(_STYLES)]
            y = np.where(np.isfinite(curve.y), curve.y, np.nan)
            axes.plot(curve.x / along.unit, y, color=colour, linestyle=style, **look)
        # matplotlib warns about equal limits, which a single point would have.
        places = np.concatenate([curve.x for curve in curves]) / along.unit
        low, high = (float(places.min()), float(places.max())) if len(places) else (0.0, 1.0)
        margin = max(0.5 if along is STEPS else 1e-9, 0.02 * (high - low))  # not 0, also for a single point
        axes.set(xlabel=along.label, ylabel=label, xlim=(low - margin, high + margin))
        axes.xaxis.set_major_locator(MaxNLocator(8 if size is WIDE else 5, integer=along is STEPS, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}" if along is STEPS else "{x:,.4g}"))
        if log:
            axes.set_yscale("log")
        else:
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
        if from_zero:
            highest = max(curve.y[np.isfinite(curve.y)].max(initial=0.0) for curve in curves)
            axes.set_ylim(0, 1.08 * highest or 1.0)
        # All curves show their values at the same places.
        longest = max(curves, key=lambda curve: len(curve.x)).x
        values = {curve.name: _at(curve, longest) for curve in curves}
        return strips(axes, size, longest, along.place, values, "{:.4g}", along.unit)

    summary = "; ".join(f"{curve.name}: {_ends(curve.y)}" for curve in curves)
    height = 0.36 * size.width if size is WIDE else 0.72 * size.width
    return draw(AltText(key, title, f"{summary}."), size, height, paint)


def _at(curve: Curve, x: Floats) -> Floats:
    """The values of a curve at places [N], those of its nearest points; NaN beyond its end."""
    if len(curve.x) == 0:
        return np.full(len(x), np.nan)
    right = np.searchsorted(curve.x, x).clip(0, len(curve.x) - 1)
    left = (right - 1).clip(0)
    nearest = np.where(np.abs(curve.x[left] - x) < np.abs(curve.x[right] - x), left, right)
    return np.where(x <= curve.x[-1], curve.y[nearest], np.nan)


def _ends(values: Floats) -> str:
    """Format the first and the last finite value, for the alt text."""
    kept = values[np.isfinite(values)]
    return f"from {kept[0]:.3g} to {kept[-1]:.3g}" if len(kept) else "none"
