"""Curves of one or more runs over steps, tokens or time: numbers in, SVG text out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, StrMethodFormatter

from engine.report.charts import running_median
from engine.report.svg import FIRST, RINGS, WIDE, AltText, Size, draw
from engine.report.words import short_tokens
from engine.units import Floats

_MANY = 500  # from this many points on, a curve is thin
_FEW = 10  # below, its points are marked: a line would hardly show
_STYLES = ("-", "--", ":", "-.")  # with the colours, these tell 24 runs apart


@dataclass(frozen=True, eq=False)
class Curve:
    """Values of a run, [N], at the places `x`, [N]. Values that are not finite leave a gap."""

    name: str
    x: Floats
    y: Floats

    def smooth(self) -> Curve:
        """Return a curve of running medians, without the gaps: noise hides how runs differ."""
        kept = np.isfinite(self.y)
        return Curve(self.name, self.x[kept], running_median(self.y[kept]))


class Along(NamedTuple):
    """What an x axis shows: its key, its label, and the text of its ticks."""

    key: str
    label: str
    tick: Callable[[float, Any], str] | None


STEPS = Along("step", "step", None)
TOKENS = Along("tokens", "tokens (K = 1,024)", lambda tokens, _: short_tokens(tokens))


def time_axis(longest: float) -> Along:
    """An axis of seconds, up to `longest`, that shows the unit in which people would say it."""
    unit, name = next(((u, n) for u, n in ((3600.0, "hours"), (60.0, "minutes")) if longest >= 3 * u), (1.0, "seconds"))
    return Along("time", f"{name} of training", lambda seconds, _: f"{seconds / unit:,.3g}")


def curves_picture(
    key: str, title: str, curves: Sequence[Curve], along: Along, label: str, size: Size = WIDE, *, log: bool = False
) -> str:
    """Draw curves over one axis. A single one has no legend. `key` must be unique in the page."""

    def paint(axes: Axes) -> None:
        for number, curve in enumerate(curves):
            look: dict[str, Any] = {"linewidth": 0.9 if len(curve.x) >= _MANY else 1.8}
            if len(curve.x) < _FEW:
                look |= {"marker": "o", "markersize": 4}
            colour = FIRST if len(curves) == 1 else RINGS[number % len(RINGS)][0]
            named = {"label": curve.name} if len(curves) > 1 else {}
            style = _STYLES[number // len(RINGS) % len(_STYLES)]
            axes.plot(curve.x, np.where(np.isfinite(curve.y), curve.y, np.nan), color=colour, ls=style, **named, **look)
        low, high = (float(f([f(curve.x) for curve in curves])) for f in (np.min, np.max))
        margin = max(0.5 if along is STEPS else 1e-9, 0.02 * (high - low))  # not 0, also for a single point
        axes.set(xlabel=along.label, ylabel=label, xlim=(low - margin, high + margin))
        if log:
            axes.set_yscale("log")
        else:
            axes.ticklabel_format(axis="y", useOffset=False)
        if along.tick is None:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        else:
            axes.xaxis.set_major_locator(MaxNLocator(8 if size is WIDE else 5))
            axes.xaxis.set_major_formatter(FuncFormatter(along.tick))

    summary = "; ".join(f"{curve.name}: {_ends(curve.y)}" for curve in curves)
    height = 0.36 * size.width if size is WIDE else 0.72 * size.width
    return draw(AltText(key, title, f"{summary}."), size, height, paint)


def _ends(values: Floats) -> str:
    """Format the first and the last finite value, for the alt text."""
    kept = values[np.isfinite(values)]
    return f"from {kept[0]:.3g} to {kept[-1]:.3g}" if len(kept) else "none"
