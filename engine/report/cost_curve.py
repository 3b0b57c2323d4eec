"""What a sequence costs, by its length: uncut, and on the ring that a plan gave it. Numbers in, SVG text out.

Letters: N rings of a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from engine.cost.model import NS
from engine.cost.times import shared
from engine.planner.durations import crossing
from engine.planner.plan import Ints, StepPlan
from engine.planner.settings import PlanSettings
from engine.report.boxes import Floats, degree_groups, group_name
from engine.report.svg import INK, QUIET, RINGS, WIDE, Size, Words, draw
from engine.report.words import short_seconds, short_tokens

_POINTS = 120  # of the curve
_MOST_RINGS = 400  # dots that a page can carry


@dataclass(frozen=True, eq=False)
class Costs:
    """Seconds by length, forward and backward, at the rates of a full-speed rank."""

    lengths: Ints  # [up to _POINTS] of the plan's sequences, and around its capacity
    uncut_s: Floats  # as many, on one rank
    ring_length: Ints  # [N]
    ring_degree: Ints  # [N]
    ring_s: Floats  # [N] on its ring, each rank of it
    capacity: int
    step_s: float  # the whole step


def costs_of(plan: StepPlan, settings: PlanSettings, step_s: float) -> Costs:
    """Return what the cost model says of a plan's sequences; of many rings some, evenly chosen by degree and length."""
    shortest, longest = min(plan.lengths.min(), -(-plan.capacity // 8)), max(plan.lengths.max(), plan.capacity)
    lengths = np.unique(np.geomspace(shortest, longest, _POINTS).round().astype(np.int64))
    rings = np.unique(_rings(plan, settings), axis=0)
    rings = rings[np.unique(np.linspace(0, len(rings) - 1, min(len(rings), _MOST_RINGS)).round().astype(np.int64))]
    rates = settings.costs.rates
    times = [shared(rates, float(s), int(d), rates.far if far else 1.0) for d, s, far in rings.tolist()]
    return Costs(
        lengths=lengths,
        uncut_s=settings.costs.sequence(lengths) / NS,
        ring_length=rings[:, 1],
        ring_degree=rings[:, 0],
        ring_s=np.array(times, dtype=np.float64) / NS,
        capacity=plan.capacity,
        step_s=step_s,
    )


def _rings(plan: StepPlan, settings: PlanSettings) -> Ints:
    """Return degree, length and whether the ring leaves its node, of each sequence that has one, [rings, 3]."""
    far = np.maximum.reduceat(crossing(plan, settings.cluster), plan.ring_start[:-1])
    return np.stack([plan.degrees, plan.lengths, far], axis=1)[plan.degrees > 1]


def cost_picture(costs: Costs, size: Size = WIDE) -> str:
    """Return the cost of a sequence against its length, both axes logarithmic; a dot is a ring of the plan."""

    def paint(axes: Axes) -> None:
        axes.plot(costs.lengths, costs.uncut_s, color=INK, linewidth=1.8, label="uncut, on one rank")
        for group, (colour, _) in zip(degree_groups(costs.ring_degree), RINGS, strict=False):
            ours = (costs.ring_degree >= group.start) & (costs.ring_degree < group.stop)
            dots: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 5.5, "markeredgewidth": 0}
            axes.plot(costs.ring_length[ours], costs.ring_s[ours], color=colour, label=group_name(group), **dots)
        step = f"the step, {short_seconds(costs.step_s)}"
        axes.axhline(costs.step_s, color=INK, linestyle="--", linewidth=1.2, label=step)
        capacity = f"capacity, {short_tokens(costs.capacity)} tokens"
        axes.axvline(costs.capacity, color=QUIET, linestyle="-.", linewidth=1.6, label=capacity)
        _name_axes(axes, size)

    longest = f"A sequence of {costs.lengths[-1]:,} tokens takes {short_seconds(costs.uncut_s[-1])} uncut"
    words = Words("cost", "Cost against length", f"{longest}; the step takes {short_seconds(costs.step_s)}.")
    return draw(words, size, 0.42 * size.width if size is WIDE else size.width, paint)


def _name_axes(axes: Axes, size: Size) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="length (tokens, K = 1,024)", ylabel="time on each rank")
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=10 if size is WIDE else 6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: short_tokens(tokens)))
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 1000 else (1.0, 2.0, 5.0), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: short_seconds(seconds)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
