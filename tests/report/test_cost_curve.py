from __future__ import annotations

import numpy as np
import pytest

from engine.cost.times import shared
from engine.planner.make import plan_step
from engine.report.cost_curve import cost_picture, costs_of
from tests.planner.samples import ints, settings
from tests.report.samples import COST_CURVE, slow_links, texts


def test_dots_are_the_rings_of_the_plan_at_the_cost_models_times() -> None:
    own = slow_links(ranks=4, mode="free")
    made = plan_step(ints(3000, 3000, 2000, 100, 7), own)
    found = costs_of(made, own, 3.0)
    rings = {(s, d) for s, d in zip(made.lengths.tolist(), made.degrees.tolist(), strict=True) if d > 1}
    assert set(zip(found.ring_length.tolist(), found.ring_degree.tolist(), strict=True)) == rings != set()
    drawn = zip(found.ring_length.tolist(), found.ring_degree.tolist(), strict=True)
    times = [shared(own.costs.rates, float(s), d, 1.0) / 1e9 for s, d in drawn]
    assert found.ring_s.tolist() == pytest.approx(times)


def test_the_curve_is_the_time_of_uncut_sequences_and_reaches_from_the_shortest_to_the_longest() -> None:
    own = settings(ranks=4, capacity=1024)
    found = costs_of(plan_step(ints(3000, 7, 400), own), own, 3.0)
    assert (found.lengths[0], found.lengths[-1]) == (7, 3000)
    assert found.uncut_s * 1e9 == pytest.approx(own.costs.sequence(found.lengths))


def test_of_many_rings_some_are_drawn() -> None:
    own = settings(ranks=4, capacity=1024)
    found = costs_of(plan_step(np.arange(1025, 3000), own), own, 3.0)
    assert 300 < len(found.ring_s) <= 400
    assert len(set(found.ring_degree.tolist())) == 2


def test_without_rings_there_are_no_dots() -> None:
    own = settings(ranks=1, capacity=1024)
    found = costs_of(plan_step(ints(7, 7), own), own, 3.0)
    assert len(found.ring_s) == 0
    assert not [text for text in texts(cost_picture(found)) if "ring" in text]


def test_axes_have_titles_and_units() -> None:
    shown = set(texts(cost_picture(COST_CURVE)))
    assert {
        "length (tokens, K = 1,024)",
        "time on each rank",
        "uncut, on one rank",
        "ring of 2",
        "ring of 300",
    } <= shown
    assert {"the step, 32.4 s", "capacity, 8K tokens", "100 ms", "4K"} <= shown
