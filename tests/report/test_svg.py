"""Properties of every picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import combinations

import matplotlib
import pytest

from engine.report.curves import COLOURS
from engine.report.svg import DARK, FIRST, LIGHT, NARROW, QUIET, RINGS, SECOND, WIDE, Size
from tests.report.samples import PICTURES, drawn, places


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=lambda size: size.name)
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_named_and_scales(name: str, size: Size) -> None:
    svg = drawn(name, size)
    root = ET.fromstring(svg)  # well-formed
    assert "width" not in root.attrib
    assert root.attrib["viewBox"].split()[2] == str(size.width)
    assert root.attrib["role"] == "img"
    title, description = root.attrib["aria-labelledby"].split()
    named = {child.attrib["id"]: child.text for child in root if "id" in child.attrib}
    assert named[title] and named[description]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_deterministic_and_a_users_own_matplotlib_settings_change_nothing(name: str) -> None:
    with matplotlib.rc_context({"svg.fonttype": "path", "axes.facecolor": "red", "font.size": 30}):
        assert PICTURES[name](WIDE) == drawn(name, WIDE)


def test_a_picture_loads_nothing_and_refers_only_to_its_own_elements() -> None:
    for name in PICTURES:
        svg = drawn(name, WIDE)
        assert "<image" not in svg and "<metadata" not in svg and "<!DOCTYPE" not in svg
        ids = {element.attrib["id"] for element in ET.fromstring(svg).iter() if "id" in element.attrib}
        assert all(identifier.startswith(f"{name}-wide-") for identifier in ids)
        links = [v for e in ET.fromstring(svg).iter() for k, v in e.attrib.items() if k.endswith("href")]
        assert {link.removeprefix("#") for link in links} <= ids


def test_the_page_chooses_the_colour_of_all_ink() -> None:
    for name in PICTURES:
        svg = drawn(name, WIDE)
        assert "currentColor" in svg and "var(--grid" in svg
        assert "#010203" not in svg and "#000000" not in svg


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=lambda size: size.name)
@pytest.mark.parametrize("name", PICTURES)
def test_no_text_covers_another_or_leaves_the_picture(name: str, size: Size) -> None:
    svg = drawn(name, size)
    width, height = map(float, ET.fromstring(svg).attrib["viewBox"].split()[2:])
    found = places(svg)
    for _, left, top, right, bottom in found:
        assert left >= -1 and top >= -1 and right <= width + 1 and bottom <= height + 1
    for a, b in combinations(found, 2):
        apart = a.right <= b.left or b.right <= a.left or a.bottom <= b.top or b.bottom <= a.top
        assert apart, f"{a} and {b}"


def luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_seen_in_light_and_dark(scheme: str) -> None:
    """At least 3 for shapes, and 4.5 for text, also on the boxes of a timeline."""
    of_page = {"light": LIGHT, "dark": DARK}[scheme]
    of_pictures = {FIRST: of_page["first"], SECOND: of_page["second"], QUIET: of_page["quiet"]}
    paper = of_page["paper"]
    shapes = [*COLOURS, QUIET, *(colour for colour, _ in RINGS)]
    assert {
        one: contrast(of_pictures.get(one, one), paper)
        for one in shapes
        if contrast(of_pictures.get(one, one), paper) < 3
    } == {}
    on_boxes = {"white": "#ffffff", "black": "#000000"}
    for box, ink in [*((box, on_boxes[ink]) for box, ink in RINGS), (of_page["quiet"], of_page["ink"])]:
        assert contrast(box, ink) >= 4.5, box
    assert min(contrast(of_page[name], paper) for name in ("ink", "soft", "warn")) >= 4.5
