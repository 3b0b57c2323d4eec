from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from engine.report.histogram import histogram_picture
from engine.report.svg import NARROW, WIDE, Size
from tests.report.samples import BUCKETS, MARKS, texts


def test_it_names_its_axes_its_bars_and_its_marks() -> None:
    shown = set(texts(histogram_picture(BUCKETS, MARKS, "documents")))
    assert {"length (tokens, K = 1,024)", "share (%)", "share of documents", "share of tokens"} <= shown
    assert {"p50 800", "p90 900", "p99 68.4K", "suggested capacity 64K"} <= shown


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=lambda size: size.name)
def test_the_last_bucket_has_its_label(size: Size) -> None:
    assert "2M" in texts(histogram_picture(BUCKETS, MARKS, size=size))


def heights(svg: str, colour: str) -> list[float]:
    """Return the heights of the bars of a colour."""
    paths = [e.attrib for e in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}path")]
    drawn = [path["d"] for path in paths if f"fill: var(--{colour}" in path.get("style", "") and "clip-path" in path]
    ends = [[float(y) for y in re.findall(r"[ML] \S+ (\S+)", d)] for d in drawn]
    return [max(ys) - min(ys) for ys in ends]


def test_bars_are_as_high_as_the_shares() -> None:
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
