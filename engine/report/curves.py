"""The curves of a run, a point a step: numbers in, SVG text out.

Letters: N steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from numpy.typing import NDArray

from engine.report.svg import FIRST, INK, SECOND, WIDE, Size, Words, draw

Floats = NDArray[np.float64]

_MANY = 500  # steps that need thin lines


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


def running_median(values: Floats) -> Floats:
    """Return the median of the values around each, [N]; the window is a tenth of them, from 5 to 51."""
    half = min(25, max(2, len(values) // 20))
    return np.array([np.median(values[max(0, at - half) : at + half + 1]) for at in range(len(values))])


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
