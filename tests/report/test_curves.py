"""Curves over steps, tokens and time."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from engine.report.curves import STEPS, Along, Curve, curves_picture, smooth, token_axis
from engine.report.svg import NARROW, WIDE, Size
from tests.report.samples import texts

NOISY = Curve("a", np.arange(1.0, 101.0), np.where(np.arange(100) % 2 == 0, 3.0, np.nan))


def lines(svg: str) -> list[int]:
    """The numbers of points of the curves."""
    paths = [e.attrib for e in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")]
    drawn = [one for one in paths if "clip-path" in one and "fill: none" in one.get("style", "")]
    grid = "var(--grid"
    return [len(re.findall(r"[ML] ", one["d"])) for one in drawn if grid not in one["style"]]


def test_a_smooth_curve_has_no_gaps() -> None:
    (found,) = smooth([NOISY])
    assert found.x.tolist() == NOISY.x[::2].tolist() and found.y.tolist() == [3.0] * 50
    assert (found.name, found.is_smooth) == ("a", True)


@pytest.mark.parametrize(("first", "last"), [(1, 237), (1, 600), (40, 300), (150, 153)])
def test_equal_values_are_equal_when_smooth(first: int, last: int) -> None:
    """Of runs that differ in length, or of which one begins from a checkpoint of the other."""
    steps, losses = np.arange(1.0, 301), np.random.default_rng(7).normal(3.0, 0.5, 600)
    other = np.arange(float(first), last + 1)
    long, short = smooth([Curve("a", steps, losses[:300]), Curve("b", other, losses[first - 1 : last])])
    both = sorted(set(long.x) & set(short.x))
    assert len(both) == min(last, 300) - first + 1
    assert [long.y[long.x == at][0] for at in both] == [short.y[short.x == at][0] for at in both]
    assert np.ptp(long.y[100:140]) < np.ptp(losses[100:140]) / 3, "noise is removed"


def test_a_steep_curve_has_no_step_where_another_ends() -> None:
    """A window that is cut there has the median of one side."""
    steps = np.arange(1.0, 601)
    loss = 5.0 * steps**-0.2
    long, _ = smooth([Curve("a", steps, loss), Curve("b", steps[:20], loss[:20])])
    np.testing.assert_allclose(long.y, loss, rtol=1e-12)  # the median of values that fall is the middle one


def test_a_curve_without_values_stays_empty() -> None:
    one, none = smooth([NOISY, Curve("b", np.arange(3.0), np.full(3, np.nan))])
    assert len(one.x) == 50 and len(none.x) == len(none.y) == 0


@pytest.mark.parametrize(
    ("most", "label", "unit"),
    [
        (2000, "tokens", 1),
        (5000, "tokens (K = 2^10)", 2**10),
        (9e6, "tokens (M = 2^20)", 2**20),
        (4e12, "tokens (T = 2^40)", 2**40),
    ],
)
def test_tokens_have_a_unit(most: float, label: str, unit: float) -> None:
    assert token_axis(most) == Along("tokens", label, unit, "{:,.0f} tokens")


def test_ticks_are_in_the_unit_of_the_axis() -> None:
    curve = Curve("a", 2.0**20 * np.arange(1.0, 11.0), np.ones(10))
    shown = texts(curves_picture("k", "Title", [curve], token_axis(10 * 2.0**20), "loss"))
    assert {"2", "4", "6", "8", "10", "tokens (M = 2^20)", "loss"} <= set(shown)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=lambda size: size.name)
def test_only_several_curves_have_a_legend(size: Size) -> None:
    two = [Curve(name, np.arange(1.0, 21.0), np.full(20, 2.0)) for name in ("first", "second")]
    assert {"first", "second"} <= set(texts(curves_picture("k", "Title", two, STEPS, "loss", size)))
    assert "first" not in texts(curves_picture("k", "Title", two[:1], STEPS, "loss", size))


def test_every_run_is_told_from_every_other() -> None:
    many = [Curve(str(n), np.arange(1.0, 21.0), np.full(20, float(n))) for n in range(16)]
    svg = curves_picture("k", "Title", many, STEPS, "loss")
    styles = [
        e.attrib["style"]
        for e in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")
        if "clip-path" in e.attrib and "fill: none" in e.get("style", "") and "grid" not in e.attrib["style"]
    ]
    assert len(set(styles)) == len(styles) == 16


@pytest.mark.parametrize("values", [[1.0], [np.nan, 2.0, np.inf], [0.0, 0.0]])
def test_any_values(values: list[float]) -> None:
    curve = Curve("a", np.arange(1.0, len(values) + 1), np.array(values))
    for options in ({}, {"from_zero": True}):
        assert "<svg" in curves_picture("k", "Title", [curve], STEPS, "loss", **options)


def test_values_from_zero() -> None:
    curve = Curve("a", np.arange(1.0, 21.0), np.linspace(40, 41, 20))
    assert "0" in texts(curves_picture("k", "T", [curve], token_axis(50), "GiB", from_zero=True))
    assert "0" not in texts(curves_picture("k", "T", [curve], Along("k", "x"), "GiB"))[8:]


def test_curves_that_coincide_are_all_visible() -> None:
    """A plan changes no loss: the curves of runs with other planners lie on each other."""
    same = [Curve(name, np.arange(1.0, 21.0), np.full(20, 2.0)) for name in ("first", "second", "third")]
    svg = curves_picture("k", "Title", same, STEPS, "loss")
    widths = [
        float(re.findall(r"stroke-width: ([0-9.]+)", e.attrib["style"])[0])
        for e in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")
        if "clip-path" in e.attrib and "fill: none" in e.get("style", "") and "grid" not in e.attrib["style"]
    ]
    assert len(widths) == 3 and widths[0] >= widths[1] + 2 >= widths[2] + 4


def titles(svg: str) -> list[str]:
    return re.findall(r"<rect[^>]*><title>([^<]*)</title>", svg)


def test_each_place_of_a_chart_says_its_values() -> None:
    """Of runs of other lengths, each where it has values."""
    curves = [Curve("a", np.arange(1.0, 5.0), np.arange(4.0)), Curve("b", np.arange(1.0, 3.0), np.array([np.nan, 7.5]))]
    svg = curves_picture("k", "Title", curves, STEPS, "loss")
    assert titles(svg) == ["step 1: a 0", "step 2: a 1, b 7.5", "step 3: a 2", "step 4: a 3"]
    many = [Curve("a", np.arange(1.0, 5001.0), np.ones(5000))]
    found = titles(curves_picture("k", "Title", many, token_axis(5000), "loss"))
    assert (found[0], found[-1], len(found)) == ("1 tokens: a 1", "5,000 tokens: a 1", 150)
