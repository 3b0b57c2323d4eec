"""Curves of one or more runs over steps, tokens or time: numbers in, SVG text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from engine.report.charts import running_median
from engine.report.svg import FIRST, WIDE, AltText, Size, draw
from engine.units import Floats

_MANY = 500  # from this many points on, a noisy curve is thin
_FEW = 10  # below, its points are marked: a line would hardly show
# The first is darker on light pages; the others, by Okabe and Ito, are visible on both.
_COLOURS = (FIRST, "#e69f00", "#009e73", "#cc79a7")
_STYLES = ("-", "--", ":", "-.")  # with the colours, these tell 16 runs apart


@dataclass(frozen=True, eq=False)
class Curve:
    """Values of a run, [N], at the places `x`, [N]. Values that are not finite leave a gap."""

    name: str
    x: Floats
    y: Floats
    is_smooth: bool = False

    def smooth(self) -> Curve:
        """Return a curve of running medians, without the gaps: noise hides how runs differ."""
        kept = np.isfinite(self.y)
        return Curve(self.name, self.x[kept], running_median(self.y[kept]), True)


class Along(NamedTuple):
    """What an x axis shows: its key, its label, and the unit of that label."""

    key: str
    label: str
    unit: float = 1.0


STEPS = Along("step", "step")


def token_axis(most: float) -> Along:
    """An axis of tokens, up to `most`."""
    units = ((2.0**40, "T = 2^40"), (2.0**30, "G = 2^30"), (2.0**20, "M = 2^20"), (2.0**10, "K = 2^10"))
    unit, name = next(((unit, f"tokens ({name})") for unit, name in units if most >= 3 * unit), (1.0, "tokens"))
    return Along("tokens", name, unit)


def time_axis(longest: float) -> Along:
    """An axis of seconds, up to `longest`, in the unit in which people would say it."""
    unit, name = next(((u, n) for u, n in ((3600.0, "hours"), (60.0, "minutes")) if longest >= 3 * u), (1.0, "seconds"))
    return Along("time", f"{name} of training", unit)


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
    """Draw curves over one axis. A single one has no legend. `key` must be unique in the page."""

    def paint(axes: Axes) -> None:
        for number, curve in enumerate(curves):
            look: dict[str, Any] = {"linewidth": 0.9 if len(curve.x) >= _MANY and not curve.is_smooth else 1.8}
            if len(curve.x) < _FEW:
                look |= {"marker": "o", "markersize": 4}
            colour = _COLOURS[number % len(_COLOURS)]
            if len(curves) > 1:
                look["label"] = curve.name
            style = _STYLES[number // len(_COLOURS) % len(_STYLES)]
            y = np.where(np.isfinite(curve.y), curve.y, np.nan)
            axes.plot(curve.x / along.unit, y, color=colour, linestyle=style, **look)
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

    summary = "; ".join(f"{curve.name}: {_ends(curve.y)}" for curve in curves)
    height = 0.36 * size.width if size is WIDE else 0.72 * size.width
    return draw(AltText(key, title, f"{summary}."), size, height, paint)


def _ends(values: Floats) -> str:
    """Format the first and the last finite value, for the alt text."""
    kept = values[np.isfinite(values)]
    return f"from {kept[0]:.3g} to {kept[-1]:.3g}" if len(kept) else "none"
