from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from engine.report.bars import parts, seconds_picture, speedup_picture
from engine.report.svg import NARROW
from tests.report.samples import SWEPT, runs, texts


def test_the_parts_of_a_step_add_up_to_it() -> None:
    for run in runs():
        found = parts(run)
        assert sum(found.values()) == pytest.approx(run["step_s"])
        assert found["idle"] == run["bubble"] * run["step_s"]
    assert parts(runs()[1])["gradients and update"] == pytest.approx(32 - 20 - 5 - 3.2)


def test_bars_say_their_planner_and_their_value() -> None:
    assert {"static", "adaptive", "1.00", "2.50", "speed-up against static"} <= set(texts(speedup_picture(runs())))
    shown = set(texts(seconds_picture(runs())))
    assert {"80 s", "32 s", "seconds of a step, mean over ranks"} <= shown
    assert {"computes", "waits for transfers", "gradients and update", "idle"} <= shown


def test_sweep_points_are_groups_whose_names_wrap_on_a_narrow_page() -> None:
    wide, narrow = texts(speedup_picture(SWEPT)), texts(speedup_picture(SWEPT, NARROW))
    assert SWEPT[0]["sweep"] in wide and "context=2M" in wide
    assert SWEPT[0]["sweep"] not in narrow
    words = [word for text in narrow for word in text.split()]
    assert set(SWEPT[0]["sweep"].split()) <= set(words)


def test_a_row_more_makes_the_picture_higher_and_its_bars_no_thinner() -> None:
    def height(points: int) -> float:
        svg = speedup_picture(runs(*(f"context={point}K" for point in range(1, points + 1))))
        return float(ET.fromstring(svg).attrib["viewBox"].split()[3])

    assert height(40) - height(20) == pytest.approx(20 * 3 * 24)
