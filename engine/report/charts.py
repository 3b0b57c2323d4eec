"""The charts of all pages except timelines and memory bars. Each `*_picture` returns an `<svg>` element.

Letters: N steps of a run, R rings of a plan.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from engine.config.schema import BASELINE
from engine.cost.times import shared
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.planner.time.durations import crossing
from engine.report.boxes import degree_groups, group_name
from engine.report.svg import FIRST, INK, PAPER, QUIET, RINGS, SECOND, WIDE, AltText, Mark, Size, draw
from engine.report.words import short_seconds, short_tokens
from engine.units import NS, Floats, Ints

Run = Mapping[str, Any]  # an entry of `runs` in the output of `simulate --json`
ROW = 24.0  # pixels
_THIRD = "#009e73"
_LETTER = 0.62  # width of a letter / font size
_MANY_STEPS = 500  # from this many steps on, lines are thin
_FEWEST_DOUBLINGS = 6  # least range of a histogram; otherwise a single bucket would fill its whole width
_TICK_LETTERS = 5.5  # width of a tick label such as 512K with the space next to it, in letters
_CURVE_POINTS = 120
_MOST_RINGS = 400  # dots of the cost curve; more would make the page slow


def speedup_picture(runs: Sequence[Run], size: Size = WIDE) -> str:
    """Draw a bar per simulated run: its speed-up over `static`, or the row that `over` names, at its sweep point."""
    over = runs[0].get("over", BASELINE)

    def paint(axes: Axes, rows: Sequence[int]) -> list[Mark]:
        ratios = [run["speedup"] for run in runs]
        axes.barh(
            rows, ratios, height=0.7, color=[QUIET if run["planner"].startswith(BASELINE) else FIRST for run in runs]
        )
        axes.vlines(
            [1.0] * len(rows), [row - 0.5 for row in rows], [row + 0.5 for row in rows], color=INK, linewidth=1.0
        )
        write_ends(axes, rows, ratios, [f"{ratio:.2f}" for ratio in ratios], size)
        axes.set_xlabel(f"speed-up over {over}")
        return row_marks(
            axes, rows, [f"{run['planner']}: {run['speedup']:.3g} times as fast as {over}" for run in runs]
        )

    best = max(runs, key=lambda run: float(run["speedup"]))
    summary = f"The best is {best['planner']}, {best['speedup']:.2f} times as fast as {over}."
    if best["speedup"] <= 1:
        summary = f"None is faster than {over}."
    return _bars(AltText("speedup", "Speed-up of each planner", summary), runs, size, paint)


def seconds_picture(runs: Sequence[Run], size: Size = WIDE) -> str:
    """Draw a stacked bar per simulated run: how its ranks spend a step, on average."""
    looks = (
        ("computes", FIRST, ""),
        ("waits for transfers", SECOND, "////"),
        ("gradients and update", _THIRD, ""),
        ("idle", QUIET, ""),
    )

    def paint(axes: Axes, rows: Sequence[int]) -> list[Mark]:
        left, marks = [0.0] * len(runs), list[Mark]()
        for label, colour, hatch in looks:
            widths = [parts(run)[label] for run in runs]
            axes.barh(
                rows, widths, left=left, height=0.7, label=label, color=colour, hatch=hatch, edgecolor=INK, linewidth=0
            )
            for run, row, start, width in zip(runs, rows, left, widths, strict=True):
                text = f"{run['planner']} {label} for {short_seconds(width)} of {short_seconds(run['step_s'])}"
                marks.append(Mark(start, start + width, row - 0.35, row + 0.35, text))
            left = [start + width for start, width in zip(left, widths, strict=True)]
        write_ends(axes, rows, left, [short_seconds(run["step_s"]) for run in runs], size)
        axes.set_xlabel("seconds per step, mean over ranks")
        return marks

    summary = "; ".join(f"{run['planner']} {short_seconds(run['step_s'])}" for run in runs)
    return _bars(AltText("seconds", "Where the time of a step goes", f"{summary}."), runs, size, paint)


def parts(run: Run) -> dict[str, float]:
    """Split a run's step time by activity, in seconds: compute, transfers, idle, and gradients and update."""
    idle = run["bubble"] * run["step_s"]
    known = {"computes": run["compute_s"], "waits for transfers": run["exposed_comm_s"], "idle": idle}
    return known | {"gradients and update": max(0.0, run["step_s"] - sum(known.values()))}


def _bars(alt: AltText, runs: Sequence[Run], size: Size, paint: Callable[[Axes, Sequence[int]], list[Mark]]) -> str:
    """Draw one row per run, with a header above the runs of each sweep point. `paint` gets the row of each run."""
    letters = int((size.width - 110) / (_LETTER * size.font))
    headers, rows, row = {}, [], 0
    for sweep, group in groupby(runs, key=lambda run: str(run.get("sweep", ""))):
        for line in textwrap.wrap(sweep, letters):
            headers[row] = line
            row += 1
        for _ in group:
            rows.append(row)
            row += 1

    def painted(axes: Axes) -> list[Mark]:
        marks = paint(axes, rows)
        for at, text in headers.items():
            axes.text(0.01, at, text, transform=axes.get_yaxis_transform(), va="center", weight="bold")
        name_rows(axes, rows, [run["planner"] for run in runs])
        return marks

    return draw(alt, size, ROW * row + 80, painted)


def name_rows(axes: Axes, rows: Sequence[int], names: Sequence[str]) -> None:
    """Write the names of bars on the y axis, the first row at the top."""
    axes.set_yticks(rows, names)
    axes.set_ylim(rows[-1] + 1 - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def row_marks(axes: Axes, rows: Sequence[int], texts: Sequence[str]) -> list[Mark]:
    """Let a pointer anywhere in a row show its text."""
    return [Mark(0, axes.get_xlim()[1], row - 0.5, row + 0.5, text) for row, text in zip(rows, texts, strict=True)]


def write_ends(axes: Axes, rows: Sequence[int], ends: Sequence[float], texts: Sequence[str], size: Size) -> None:
    """Write each of `texts` after the end of its bar, and widen the x axis so that the longest text fits."""
    margin = (max(map(len, texts)) + 1.5) * _LETTER * size.font / (size.width - 110)
    axes.set_xlim(0, max(ends) / (1 - margin))
    behind = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.5}  # a line behind a text would strike it out
    for row, end, text in zip(rows, ends, texts, strict=True):
        axes.annotate(text, (end, row), xytext=(4, 0), textcoords="offset points", va="center", color=INK, bbox=behind)


def histogram_picture(
    buckets: Sequence[Mapping[str, int]], marks: Mapping[str, int], name: str = "sequences", size: Size = WIDE
) -> str:
    """Draw a histogram of lengths, with two bars per bucket: percentages of all `name` and of all tokens.

    `buckets` are those of engine/data/profile.py: numbers of `samples` and `tokens` with lengths above the previous
    `upto` and at most its own. `marks` are up to four lengths by label, drawn as vertical lines.
    """
    # The axis shows powers of two, not a logarithmic scale of matplotlib, so that all bars have the same width.
    edge = np.log2([bucket["upto"] for bucket in buckets])
    last = max([edge[-1], *np.log2(list(marks.values()))])
    first = max(-1.1, min(edge[0] - 1.1, last - _FEWEST_DOUBLINGS))

    def paint(axes: Axes) -> list[Mark]:
        # Each bucket has two bars: its share of the documents says little about its share of the tokens.
        for kind, left, colour, label in (
            ("samples", 0.92, FIRST, f"% of {name}"),
            ("tokens", 0.50, SECOND, "% of tokens"),
        ):
            counts = np.array([bucket[kind] for bucket in buckets], dtype=np.float64)
            axes.bar(edge - left, 100 * counts / counts.sum(), width=0.42, align="edge", color=colour, label=label)
        # Dash patterns distinguish the marks without colours.
        for style, (mark, length) in zip((":", "-.", "--", "-"), marks.items(), strict=False):
            label = f"{mark} {short_tokens(length)}"
            axes.axvline(np.log2(length), color=INK, linestyle=style, linewidth=1.4, label=label)
        axes.set(xlabel="length (tokens, K = 1,024)", ylabel="%", xlim=(first, last + 0.3))
        # As many tick labels as fit next to each other, from the last bucket on.
        every = int(np.ceil((last + 0.3 - first) * _TICK_LETTERS * size.font * _LETTER / (size.width - 80)))
        axes.set_xticks(np.arange(edge[-1], max(first, -0.1), -every))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda power, _: short_tokens(2.0**power)))
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.grid(visible=False, axis="x")
        samples, tokens = (sum(bucket[kind] for bucket in buckets) for kind in ("samples", "tokens"))
        found = []
        for at, bucket, before in zip(edge, buckets, [0, *(bucket["upto"] for bucket in buckets)], strict=False):
            text = f"{before + 1:,} to {bucket['upto']:,} tokens: {bucket['samples']:,} {name} "
            text += f"({bucket['samples'] / samples:.1%}), {bucket['tokens'] / tokens:.1%} of the tokens"
            found.append(Mark(at - 1, at, 0, axes.get_ylim()[1], text))
        return found

    summary = ", ".join(f"{mark} {length:,}" for mark, length in marks.items())
    alt = AltText("lengths", f"Lengths by share of {name} and of tokens", f"Lengths in tokens: {summary}.")
    return draw(alt, size, 0.4 * size.width if size is WIDE else 0.95 * size.width, paint)


def loss_picture(steps: Floats, loss: Floats, validation: Floats, bigram_nats: float, size: Size = WIDE) -> str:
    """Draw the training and validation loss of `steps` [N], in nats per token.

    `validation` [N] is NaN for steps without validation. Values that are not finite leave a gap; a bigram entropy of
    NaN is not drawn.
    """
    loss, validation = _finite(loss), _finite(validation)
    validated = np.isfinite(validation)

    def paint(axes: Axes) -> list[Mark]:
        # Few steps: dots, because a line would hardly show. Many: a thin line, because a thick one would blur.
        curve = {"marker": "o", "markersize": 4} if len(steps) < 10 else {"linewidth": 1.8}
        axes.plot(
            steps, loss, color=FIRST, label="training", **(curve if len(steps) < _MANY_STEPS else {"linewidth": 0.9})
        )
        if validated.any():
            dots: dict[str, Any] = {"marker": "o", "markersize": 5, "linewidth": 1}
            axes.plot(steps[validated], validation[validated], color=SECOND, label="validation", **dots)
        if np.isfinite(bigram_nats):
            name = f"bigram entropy, {bigram_nats:.2f}"
            axes.axhline(bigram_nats, color=INK, linestyle="--", linewidth=1.2, label=name)
        axes.set_ylabel("loss (nats per token)")
        _step_axis(axes, steps)
        return strips(axes, size, steps, "step {:,.0f}", {"training": loss, "validation": validation}, "{:.3f}")

    summary = f"Training loss: {_first_and_last(loss)}. Validation loss: {_first_and_last(validation)}."
    if np.isfinite(bigram_nats):
        summary += f" Bigram entropy of the corpus: {bigram_nats:.3f}."
    return draw(AltText("loss", "Loss at each step", summary), size, _curve_height(size), paint)


def throughput_picture(steps: Floats, tokens_per_s: Floats, size: Size = WIDE) -> str:
    """Draw the throughput of all ranks together over `steps` [N], with a running median."""
    rate = _finite(tokens_per_s)
    kept = np.isfinite(rate)

    def paint(axes: Axes) -> list[Mark]:
        few = len(steps) < _MANY_STEPS
        look: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 3.5} if few else {"linewidth": 0.8}
        axes.plot(steps, rate, color=FIRST, alpha=0.6, label="one step", **look)
        axes.plot(
            steps[kept],
            running_median(rate[kept], half_window(len(steps))),
            color=SECOND,
            linewidth=2.2,
            label="running median",
        )
        axes.set(ylabel="throughput (tokens/s)", ylim=(0, 1.08 * rate[kept].max(initial=1.0)))
        _step_axis(axes, steps)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        return strips(axes, size, steps, "step {:,.0f}", {"tokens/s": rate}, "{:,.0f}")

    summary = f"Median: {np.median(rate[kept]):,.0f} tokens per second." if kept.any() else "No step was measured."
    return draw(AltText("throughput", "Tokens per second in each step", summary), size, _curve_height(size), paint)


def strips(
    axes: Axes, size: Size, x: Floats, place: str, curves: Mapping[str, Floats], value: str, unit: float = 1.0
) -> list[Mark]:
    """Cut the width of a chart into strips around its points, or some of them, with the values of curves there.

    `x` [N] are the places of the points, formatted with `place`; on the axis they are divided by `unit`. `curves` are
    values [N], formatted with `value`; those that are not finite are left out.
    """
    chosen = np.unique(np.linspace(0, len(x) - 1, min(len(x), size.values // 4)).round().astype(np.int64))
    low, high = axes.get_ylim()
    at = x[chosen] / unit
    edges = [axes.get_xlim()[0], *((at[1:] + at[:-1]) / 2), axes.get_xlim()[1]]
    marks = []
    for number, point in enumerate(chosen.tolist()):
        values = [f"{name} {value.format(of[point])}" for name, of in curves.items() if np.isfinite(of[point])]
        if values:
            text = f"{place.format(x[point])}: {', '.join(values)}"
            marks.append(Mark(edges[number], edges[number + 1], low, high, text))
    return marks


def half_window(values: int) -> int:
    """How many values a running median of so many takes on each side: the window is a tenth of them, 5 to 51."""
    return min(25, max(2, values // 20))


def running_median(values: Floats, half: int | Ints) -> Floats:
    """Median of a window around each value, [N]: `half` values on each side, or `half[i]`, if there are so many."""
    halves = np.broadcast_to(half, len(values))
    return np.array([np.median(values[max(0, at - on) : at + on + 1]) for at, on in enumerate(halves)])


def _step_axis(axes: Axes, steps: Floats) -> None:
    margin = max(0.5, 0.02 * np.ptp(steps))  # not 0, also for a run of a single step
    axes.set(xlabel="step", xlim=(steps.min() - margin, steps.max() + margin))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def _curve_height(size: Size) -> float:
    return 0.36 * size.width if size is WIDE else 0.72 * size.width


def _finite(values: Floats) -> Floats:
    """Replace infinity, which no axis can show, by NaN, which leaves a gap."""
    return np.where(np.isfinite(values), values, np.nan)


def _first_and_last(values: Floats) -> str:
    """Format the first and the last finite value, for the alt text; `none` if there is no such value."""
    kept = values[np.isfinite(values)]
    return f"from {kept[0]:.3f} to {kept[-1]:.3f}" if len(kept) else "none"


@dataclass(frozen=True, eq=False)
class CostCurve:
    """Time of sequences by length, forward and backward, on full-speed ranks: unsplit, and on rings of a plan."""

    lengths: Ints  # [up to _CURVE_POINTS], covering the plan's sequences and its capacity
    unsplit_s: Floats  # of each of `lengths` on one rank
    ring_length: Ints  # [R]
    ring_degree: Ints  # [R]
    ring_s: Floats  # [R] on each rank of the ring
    capacity: int
    step_s: float  # the whole step


def cost_curve(plan: StepPlan, settings: PlanSettings, step_s: float) -> CostCurve:
    """Compute the cost curve of a plan. Of more than _MOST_RINGS different rings, an even selection is kept."""
    whole, degrees = plan.sequence_lengths, plan.degrees[plan.before == 0]
    shortest, longest = min(whole.min(), -(-plan.capacity // 8)), max(whole.max(), plan.capacity)
    lengths = np.unique(np.geomspace(shortest, longest, _CURVE_POINTS).round().astype(np.int64))
    crosses = np.maximum.reduceat(crossing(plan, settings.cluster), plan.ring_start[:-1])[plan.before == 0]
    rings = np.unique(np.stack([degrees, whole, crosses], axis=1)[degrees > 1], axis=0)  # 1 in `crosses`: leaves a node
    rings = rings[np.unique(np.linspace(0, len(rings) - 1, min(len(rings), _MOST_RINGS)).round().astype(np.int64))]
    rates = settings.costs.rates
    times = [shared(rates, float(s), int(d), rates.inter_node_slowdown if far else 1.0) for d, s, far in rings.tolist()]
    return CostCurve(
        lengths=lengths,
        unsplit_s=settings.costs.sequence(lengths) / NS,
        ring_length=rings[:, 1],
        ring_degree=rings[:, 0],
        ring_s=np.array(times, dtype=np.float64) / NS,
        capacity=plan.capacity,
        step_s=step_s,
    )


def cost_picture(found: CostCurve, size: Size = WIDE) -> str:
    """Draw the time of a sequence against its length, on logarithmic axes, with a dot for each ring of the plan."""

    def paint(axes: Axes) -> list[Mark]:
        # A sequence whose time on one rank is above the line of the step would make the step longer unless it is split.
        axes.plot(found.lengths, found.unsplit_s, color=INK, linewidth=1.8, label="unsplit, on one rank")
        for group, (colour, _) in zip(degree_groups(found.ring_degree), RINGS, strict=False):
            ours = (found.ring_degree >= group.start) & (found.ring_degree < group.stop)
            dots: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 5.5, "markeredgewidth": 0}
            axes.plot(found.ring_length[ours], found.ring_s[ours], color=colour, label=group_name(group), **dots)
        step = f"the step, {short_seconds(found.step_s)}"
        axes.axhline(found.step_s, color=INK, linestyle="--", linewidth=1.2, label=step)
        capacity = f"capacity, {short_tokens(found.capacity)} tokens"
        axes.axvline(found.capacity, color=QUIET, linestyle="-.", linewidth=1.6, label=capacity)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set(xlabel="length (tokens, K = 1,024)", ylabel="time on each rank")
        axes.xaxis.set_major_locator(LogLocator(base=2, numticks=10 if size is WIDE else 6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: short_tokens(tokens)))
        # A short axis has few powers of ten, so it also gets labels at 2 and 5 times these.
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 1000 else (1.0, 2.0, 5.0), numticks=12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: short_seconds(seconds)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
        # The marks of rings come last, on top of those of the curve, which fill the whole height.
        unsplit = zip(found.lengths[:-1], found.lengths[1:], found.unsplit_s[1:], strict=True)
        marks = [
            Mark(left, right, low, high, f"{right:,} tokens unsplit: {short_seconds(time)}")
            for left, right, time in unsplit
        ]
        for length, degree, time in zip(found.ring_length, found.ring_degree, found.ring_s, strict=True):
            text = f"{length:,} tokens on a ring of {degree:,}: {short_seconds(time)}"
            marks.append(Mark(length / 1.06, length * 1.06, time / 1.12, time * 1.12, text))
        return marks

    longest = f"An unsplit sequence of {found.lengths[-1]:,} tokens takes {short_seconds(found.unsplit_s[-1])}"
    alt = AltText("cost", "Time against length", f"{longest}; the step takes {short_seconds(found.step_s)}.")
    return draw(alt, size, 0.42 * size.width if size is WIDE else size.width, paint)
