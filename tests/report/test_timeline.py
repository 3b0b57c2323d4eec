from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from engine.report.boxes import boxes, shown_ranks
from engine.report.svg import NARROW, WIDE, Size
from engine.report.timeline import some_ranks, timeline_picture
from tests.report.runs import plan, spans
from tests.report.samples import all_boxes, texts


def timeline(ranks: int, mode: str = "free", size: Size = WIDE) -> str:
    made = plan(ranks, sequences=6 * min(ranks, 50), mode=mode)
    return timeline_picture(boxes(made, spans(made), shown_ranks(ranks)), size)


def test_boxes_are_labelled_with_ring_size_and_tokens_where_they_fit() -> None:
    shown = texts(timeline(4))
    assert any(text.startswith("ring of 3 · ") for text in shown)
    assert {"unsplit sequences", "ring of 3"} <= set(shown)


def test_idle_boxes_are_hatched_and_in_the_legend() -> None:
    idle, busy = timeline(4, mode="lockstep"), timeline(4)
    assert "idle" in texts(idle) and "<pattern" in idle
    assert "idle" not in texts(busy) and "<pattern" not in busy


def test_one_rank_has_no_ring() -> None:
    assert not [text for text in texts(timeline(1)) if "ring" in text]


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=lambda size: size.name)
def test_hundreds_of_ranks_stay_legible(size: Size) -> None:
    """64 ranks are shown, each with its number; boxes have no labels, and few colours are used."""
    svg = timeline(300, size=size)
    shown = texts(svg)
    assert not [text for text in shown if "tokens" in text or "·" in text]
    assert [text for text in shown if text.isdigit()] == [str(rank) for rank in shown_ranks(300)]
    assert sum("ring" in text for text in shown) <= 6
    assert float(ET.fromstring(svg).attrib["viewBox"].split()[3]) < 900


def test_it_says_how_many_ranks_are_shown() -> None:
    made = plan(6)
    assert some_ranks(all_boxes(made)) == ""
    some = boxes(made, spans(made), np.array([0, 5]))
    assert "Of 6 ranks, 2 are shown" in some_ranks(some)
    assert "6 ranks, of which 2 are shown" in timeline_picture(some)


def test_waits_for_transfers_are_hatched_and_in_the_legend() -> None:
    made = plan(4)
    waiting = [span._replace(exposed_s=0.4 * (span.stop_s - span.start_s)) for span in spans(made)]
    found = boxes(made, waiting, np.arange(4))
    assert "waits for transfers" in texts(timeline_picture(found)) and "<pattern" in timeline_picture(found)
    assert "waits for transfers" not in texts(timeline_picture(all_boxes(made)))


def test_boxes_of_less_than_a_pixel_are_not_hidden_by_their_edges() -> None:
    made = plan(4)
    edges = [
        len(re.findall("stroke-width|stroke: var", timeline_picture(all_boxes(made), until_s=until)))
        for until in (3.2, 3200.0)
    ]
    assert edges[1] < edges[0]
    assert "unsplit sequences" in texts(timeline_picture(all_boxes(made), until_s=3200.0))
