from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable

import matplotlib
import numpy as np
import pytest

from engine.report.pictures import loss_picture, running_median, throughput_picture, timeline_picture
from engine.report.svg import NARROW, WIDE, Size
from tests.report.runs import plan, spans

STEPS = np.arange(1.0, 41.0)
LOSS = 5 / np.sqrt(STEPS)
VALIDATION = np.where(STEPS % 10 == 0, LOSS, np.nan)
SVG = "{http://www.w3.org/2000/svg}"

PICTURES: dict[str, Callable[[Size], str]] = {
    "loss": lambda size: loss_picture(STEPS, LOSS, VALIDATION, 2.43, size),
    "timeline": lambda size: timeline_picture(plan(4), spans(plan(4)), size),
    "throughput": lambda size: throughput_picture(STEPS, 1000 * LOSS, size),
}


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}text")]


def timeline(ranks: int, mode: str = "free", size: Size = WIDE) -> str:
    made = plan(ranks, sequences=6 * min(ranks, 50), mode=mode)
    return timeline_picture(made, spans(made), size)


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=lambda size: size.name)
@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_deterministic_named_and_scales(name: str, size: Size) -> None:
    svg = PICTURES[name](size)
    assert svg == PICTURES[name](size)
    root = ET.fromstring(svg)  # well-formed
    assert "width" not in root.attrib
    assert root.attrib["viewBox"].split()[2] == str(size.width)
    assert root.attrib["role"] == "img"
    title, description = root.attrib["aria-labelledby"].split()
    named = {child.attrib["id"]: child.text for child in root if "id" in child.attrib}
    assert named[title] and named[description]


@pytest.mark.parametrize("name", PICTURES)
def test_a_users_own_matplotlib_settings_change_nothing(name: str) -> None:
    before = PICTURES[name](WIDE)
    with matplotlib.rc_context({"svg.fonttype": "path", "axes.facecolor": "red", "font.size": 30}):
        assert PICTURES[name](WIDE) == before


def test_a_picture_loads_nothing_and_refers_only_to_its_own_elements() -> None:
    for name, picture in PICTURES.items():
        svg = picture(WIDE)
        assert "<image" not in svg and "<metadata" not in svg and "<!DOCTYPE" not in svg
        ids = {element.attrib["id"] for element in ET.fromstring(svg).iter() if "id" in element.attrib}
        assert all(identifier.startswith(f"{name}-wide-") for identifier in ids)
        links = [v for e in ET.fromstring(svg).iter() for k, v in e.attrib.items() if k.endswith("href")]
        assert {link.removeprefix("#") for link in links} <= ids


def test_the_page_chooses_the_colour_of_all_ink() -> None:
    for picture in PICTURES.values():
        svg = picture(WIDE)
        assert "currentColor" in svg and "var(--grid" in svg
        assert "#010203" not in svg and "#000000" not in svg


def test_axes_have_titles_and_units() -> None:
    assert {"step", "loss (nats a token)", "bigram entropy, 2.43"} <= set(texts(PICTURES["loss"](WIDE)))
    assert {"step", "throughput (tokens/s)"} <= set(texts(PICTURES["throughput"](WIDE)))
    assert {"rank", "seconds from the start of the step"} <= set(texts(PICTURES["timeline"](WIDE)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_not_finite_leaves_a_gap(bad: float) -> None:
    some = np.where(STEPS == 20, bad, LOSS)
    all_ = np.full_like(LOSS, bad)
    for loss in (some, all_):
        svg = loss_picture(STEPS, loss, VALIDATION, 2.43)
        ET.fromstring(svg)
        assert "NaN" not in svg and ' d="M nan' not in svg and "inf " not in svg


def test_what_is_not_known_is_not_drawn() -> None:
    svg = loss_picture(STEPS, LOSS, np.full_like(LOSS, np.nan), float("nan"))
    assert not [text for text in texts(svg) if "validation" in text or "bigram" in text]


@pytest.mark.parametrize("steps", [1, 2, 600])
def test_any_number_of_steps_can_be_drawn(steps: int) -> None:
    at = np.arange(1.0, steps + 1)
    shown = texts(loss_picture(at, at, at, 2.43))
    assert "step" in shown and "0.96" not in shown  # ticks of steps are whole numbers
    assert "step" in texts(throughput_picture(at, at))


def test_boxes_are_labelled_with_ring_size_and_tokens_where_they_fit() -> None:
    shown = texts(timeline(4))
    assert any(text.startswith("ring of 3 · ") for text in shown)
    assert {"whole sequences", "ring of 3"} <= set(shown)


def test_idle_boxes_are_hatched_and_in_the_legend() -> None:
    idle, busy = timeline(4, mode="lockstep"), timeline(4)
    assert "idle" in texts(idle) and "<pattern" in idle
    assert "idle" not in texts(busy) and "<pattern" not in busy


def test_one_rank_has_no_ring() -> None:
    assert not [text for text in texts(timeline(1)) if "ring" in text]


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=lambda size: size.name)
def test_hundreds_of_ranks_stay_legible(size: Size) -> None:
    """Rows shrink, no box has a label, every 16th rank has a number, and the colours stay few."""
    svg = timeline(300, size=size)
    shown = texts(svg)
    assert not [text for text in shown if "tokens" in text or "·" in text]
    assert [text for text in shown if text.isdigit()] == [str(rank) for rank in range(0, 300, 16)]
    assert sum("ring" in text for text in shown) <= 6
    assert float(ET.fromstring(svg).attrib["viewBox"].split()[3]) < 900


def test_running_median_of_a_jump_and_a_spike() -> None:
    values = np.array([1.0, 1, 1, 9, 1, 1, 5, 5, 5, 5])
    assert running_median(values).tolist() == [
        float(np.median(values[max(0, at - 2) : at + 3])) for at in range(len(values))
    ]
    assert running_median(values)[3] == 1.0
