"""Bars, histogram, curves of a run, cost curve."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from engine.cost.times import shared
from engine.planner.make import plan_step
from engine.report.charts import (
    cost_curve,
    cost_picture,
    histogram_picture,
    loss_picture,
    parts,
    running_median,
    seconds_picture,
    speedup_picture,
    throughput_picture,
)
from engine.report.svg import NARROW, WIDE, Size
from tests.planner.samples import ints, settings
from tests.report.samples import BUCKETS, COST_CURVE, LOSS, MARKS, STEPS, SWEPT, VALIDATION, runs, slow_links, texts


def test_the_parts_of_a_step_add_up_to_it() -> None:
    for run in runs():
        found = parts(run)
        assert sum(found.values()) == pytest.approx(run["step_s"])
        assert found["idle"] == run["bubble"] * run["step_s"]
    assert parts(runs()[1])["gradients and update"] == pytest.approx(32 - 20 - 5 - 3.2)


def test_bars_are_labelled_with_planner_and_value() -> None:
    assert {"static", "adaptive", "1.00", "2.50", "speed-up over static"} <= set(texts(speedup_picture(runs())))
    shown = set(texts(seconds_picture(runs())))
    assert {"80 s", "32 s", "seconds per step, mean over ranks"} <= shown
    assert {"computes", "waits for transfers", "gradients and update", "idle"} <= shown


def test_sweep_points_are_groups_whose_names_wrap_on_a_narrow_page() -> None:
    wide, narrow = texts(speedup_picture(SWEPT)), texts(speedup_picture(SWEPT, NARROW))
    assert SWEPT[0]["sweep"] in wide and "context=2M" in wide
    assert SWEPT[0]["sweep"] not in narrow
    words = [word for text in narrow for word in text.split()]
    assert set(SWEPT[0]["sweep"].split()) <= set(words)


def test_more_rows_make_the_picture_higher_and_its_bars_no_thinner() -> None:
    def height(points: int) -> float:
        svg = speedup_picture(runs(*(f"context={point}K" for point in range(1, points + 1))))
        return float(ET.fromstring(svg).attrib["viewBox"].split()[3])

    assert height(40) - height(20) == pytest.approx(20 * 3 * 24)


def test_a_histogram_names_its_axes_its_bars_and_its_marks() -> None:
    shown = set(texts(histogram_picture(BUCKETS, MARKS, "documents")))
    assert {"length (tokens, K = 1,024)", "%", "% of documents", "% of tokens"} <= shown
    assert {"p50 800", "p90 900", "p99 68.4K", "suggested capacity 64K"} <= shown


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=lambda size: size.name)
def test_the_last_bucket_has_its_label(size: Size) -> None:
    assert "2M" in texts(histogram_picture(BUCKETS, MARKS, size=size))


def heights(svg: str, colour: str) -> list[float]:
    """Heights of the bars of a colour."""
    paths = [e.attrib for e in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")]
    drawn = [path["d"] for path in paths if f"fill: var(--{colour}" in path.get("style", "") and "clip-path" in path]
    ends = [[float(y) for y in re.findall(r"[ML] \S+ (\S+)", d)] for d in drawn]
    return [max(ys) - min(ys) for ys in ends]


def test_bars_are_as_high_as_the_percentages() -> None:
    buckets = [{"upto": 8, "samples": 3, "tokens": 18}, {"upto": 16, "samples": 1, "tokens": 16}]
    svg = histogram_picture(buckets, {})
    few, tokens = heights(svg, "first"), heights(svg, "second")
    assert few[0] / few[1] == pytest.approx(3, rel=1e-4)
    assert tokens[0] / tokens[1] == pytest.approx(18 / 16, rel=1e-4)
    assert few[0] / tokens[0] == pytest.approx((3 / 4) / (18 / 34), rel=1e-4)


@pytest.mark.parametrize("upto", [1, 2, 2**21])
def test_a_single_bucket(upto: int) -> None:
    svg = histogram_picture([{"upto": upto, "samples": 1, "tokens": upto}], {"p50": upto})
    shown = [text for text in texts(svg) if text == "0"]
    assert len(shown) == 1, "no length is below one token"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_not_finite_leaves_a_gap(bad: float) -> None:
    some = np.where(STEPS == 20, bad, LOSS)
    all_ = np.full_like(LOSS, bad)
    for loss in (some, all_):
        svg = loss_picture(STEPS, loss, VALIDATION, 2.43)
        ET.fromstring(svg)
        assert "NaN" not in svg and ' d="M nan' not in svg and "inf " not in svg


def test_unknown_values_are_not_drawn() -> None:
    svg = loss_picture(STEPS, LOSS, np.full_like(LOSS, np.nan), float("nan"))
    assert not [text for text in texts(svg) if "validation" in text or "bigram" in text]


@pytest.mark.parametrize("steps", [1, 2, 600])
def test_any_number_of_steps_can_be_drawn(steps: int) -> None:
    at = np.arange(1.0, steps + 1)
    shown = texts(loss_picture(at, at, at, 2.43))
    assert "step" in shown and "0.96" not in shown  # ticks of steps are whole numbers
    assert "step" in texts(throughput_picture(at, at))


def test_running_median_of_a_jump_and_a_spike() -> None:
    values = np.array([1.0, 1, 1, 9, 1, 1, 5, 5, 5, 5])
    assert running_median(values, 2).tolist() == [
        float(np.median(values[max(0, at - 2) : at + 3])) for at in range(len(values))
    ]
    assert running_median(values, 2)[3] == 1.0


def test_axes_of_a_run_have_titles_and_units() -> None:
    assert {"step", "loss (nats per token)", "bigram entropy, 2.43"} <= set(
        texts(loss_picture(STEPS, LOSS, VALIDATION, 2.43))
    )
    assert {"step", "throughput (tokens/s)"} <= set(texts(throughput_picture(STEPS, LOSS)))


def test_dots_are_the_rings_of_the_plan_at_the_cost_models_times() -> None:
    own = slow_links(ranks=4, mode="free")
    made = plan_step(ints(3000, 3000, 2000, 100, 7), own)
    found = cost_curve(made, own, 3.0)
    rings = {(s, d) for s, d in zip(made.lengths.tolist(), made.degrees.tolist(), strict=True) if d > 1}
    assert set(zip(found.ring_length.tolist(), found.ring_degree.tolist(), strict=True)) == rings != set()
    drawn = zip(found.ring_length.tolist(), found.ring_degree.tolist(), strict=True)
    times = [shared(own.costs.rates, float(s), d, 1.0) / 1e9 for s, d in drawn]
    assert found.ring_s.tolist() == pytest.approx(times)


def test_the_curve_is_the_time_of_unsplit_sequences_and_reaches_from_the_shortest_to_the_longest() -> None:
    own = settings(ranks=4, capacity=1024)
    found = cost_curve(plan_step(ints(3000, 7, 400), own), own, 3.0)
    assert (found.lengths[0], found.lengths[-1]) == (7, 3000)
    assert found.unsplit_s * 1e9 == pytest.approx(own.costs.sequence(found.lengths))


def test_of_many_rings_a_selection_is_drawn() -> None:
    own = settings(ranks=4, capacity=1024)
    found = cost_curve(plan_step(np.arange(1025, 3000), own), own, 3.0)
    assert 300 < len(found.ring_s) <= 400
    assert len(set(found.ring_degree.tolist())) == 2


def test_without_rings_there_are_no_dots() -> None:
    own = settings(ranks=1, capacity=1024)
    found = cost_curve(plan_step(ints(7, 7), own), own, 3.0)
    assert len(found.ring_s) == 0
    assert not [text for text in texts(cost_picture(found)) if "ring" in text]


def test_axes_of_the_cost_curve_have_titles_and_units() -> None:
    shown = set(texts(cost_picture(COST_CURVE)))
    assert {
        "length (tokens, K = 1,024)",
        "time on each rank",
        "unsplit, on one rank",
        "ring of 2",
        "ring of 300",
    } <= shown
    assert {"the step, 32.4 s", "capacity, 8K tokens", "100 ms", "4K"} <= shown
