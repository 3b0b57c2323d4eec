"""The pages of plans, simulations and lengths, and properties of every page."""

from __future__ import annotations

import re
from typing import Any

import pytest

from engine.config.load import load
from engine.fit.estimate import estimate
from engine.job import Job
from engine.report.headline import Headline, of_simulation
from engine.report.memory_page import memory_page
from engine.report.page import Figure, Page, Table
from tests.report.elements import Elements
from tests.report.pages import PAGES, SMALL, lengths, memory, plans, run, simulation

NAMESPACE = re.compile(r'xmlns(:xlink)?="http://www\.w3\.org/[^"]*"')


@pytest.mark.parametrize("name", PAGES)
def test_a_page_loads_nothing_and_no_two_elements_share_an_id(name: str) -> None:
    html = PAGES[name]().html()
    assert "http" not in NAMESPACE.sub("", html)
    assert "@import" not in html and not re.search(r"url\((?!#)", html)
    found = Elements(html).found
    assert not {tag for tag, _ in found} & {"script", "link", "iframe", "object", "embed", "img"}
    ids = [attributes["id"] for _, attributes in found if "id" in attributes]
    assert len(ids) == len(set(ids)) > 0


@pytest.mark.parametrize("page", [run, plans])
def test_the_same_numbers_give_the_same_page(page: Any) -> None:
    assert page.__wrapped__().html() == page().html()


def test_a_plan_has_its_timeline_its_lengths_its_costs_and_its_numbers() -> None:
    page = plans()
    titles = ["Timeline of a step", "Lengths", "Time against length", "Memory of a device"]
    assert [figure.title for figure in page.figures] == titles
    head = dict(page.head)
    assert (head["planner"], head["context"], head["capacity of a rank"]) == ("adaptive", "8K tokens", "2K tokens")
    assert head["ranks"] == "4 ranks, cluster=local"
    assert head["mode"].startswith("free: ")
    (table,) = page.tables
    assert not table.columns and "Makespan: " in page.html()
    assert dict(table.rows)["planning (s)"] == "0.250"


def test_several_steps_are_columns() -> None:
    (table,) = plans(steps=3).tables
    assert table.columns == ("", "step 1", "step 2", "step 3")
    assert {len(row) for row in table.rows} == {4}


@pytest.mark.parametrize(
    "mode", [["zero.stage=3"], ["parallel.pp=2", "capacity=4K"], ["planner=static"], ["cluster.nodes=20"]]
)
def test_plans_of_every_mode_have_a_page(mode: list[str]) -> None:
    page = plans(*mode)
    assert all(figure.wide for figure in page.figures)
    assert ("first stage" in page.figures[0].caption) == (mode[0] == "parallel.pp=2")
    assert ("Of 80 ranks, 64 are shown" in page.figures[0].caption) == (mode == ["cluster.nodes=20"])


def test_a_simulation_has_bars_and_a_timeline_of_each_planner_on_its_own_scale() -> None:
    page = simulation()
    titles = [figure.title for figure in page.figures]
    assert titles == ["Speed-up", "Where the time goes", "Timeline: static", "Timeline: adaptive"]
    assert page.headline.figure.endswith(" times as fast") and "(static)" in page.headline.text
    (table,) = page.tables
    assert [row[0] for row in table.rows] == ["static", "adaptive"]
    assert "speed-up" in table.columns and dict(page.head)["ranks"] == "4 ranks"


def test_a_simulation_claims_no_speed_up_that_rounds_to_1() -> None:
    """Of rows that are equally fast, the headline names that of adaptive; its label, not its planner, names a row."""
    names = ("static", "naive", "naive, no eq. 3", "adaptive")

    def said(*seconds: float) -> Headline:
        rows = zip(names, seconds, strict=True)
        found = [{"label": name, "planner": name.split(",")[0], "step_s": each, "ranks": 8} for name, each in rows]
        return of_simulation(found, "bytescale tune")

    for adaptive in (279.0, 280.0, 281.0):
        even = said(280.0, 300.0, 280.0, adaptive)
        assert "times" not in even.figure + even.text and "with adaptive" in even.text
    assert said(280.0, 300.0, 140.0, 140.1).text.startswith("adaptive is 2.00 times")
    assert said(280.0, 300.0, 278.0, 279.0).text.startswith("naive, no eq. 3 is 1.01 times")
    assert said(280.0, 300.0, 140.0, 150.0).text.startswith("naive, no eq. 3 is 2.00 times")
    assert said(280.0, 560.0, 560.0, 420.0).figure == "static is 1.50 times as fast"


def test_a_sweep_shows_timelines_of_its_first_point_and_says_so() -> None:
    page = simulation("capacity=2K", "capacity=4K")
    assert dict(page.head)["sweep"] == "2 points"
    assert len(page.figures) == 4
    assert "The first step of capacity=2K, planned by static" in page.figures[2].caption
    assert [row[1] for row in page.tables[0].rows] == ["capacity=2K"] * 2 + ["capacity=4K"] * 2


def test_lengths_have_a_histogram_with_the_suggested_capacity() -> None:
    page = lengths()
    (figure,) = page.figures
    assert "suggested capacity 2K" in figure.wide and "sample" not in figure.caption
    assert [table.title for table in page.tables] == ["Lengths in tokens", "One step at the suggested capacity"]
    assert dict(page.head)["ring of the longest sequence"] == "3 ranks at that capacity"
    assert page.warning is None


def test_a_sample_says_so() -> None:
    page = lengths(share=0.5)
    assert "50.00% of the source was read" in page.figures[0].caption
    assert dict(page.head)["documents"].startswith("about ")


def test_a_context_that_fits_nowhere_has_no_suggestion() -> None:
    page = lengths(fits=False)
    assert "suggested" not in page.figures[0].wide
    assert "suggested capacity" not in dict(page.head)
    assert page.warning is not None and "does not fit" in page.html()


def test_text_in_pictures_is_escaped_and_no_formula() -> None:
    """Values that are swept are the user's words."""
    html = simulation("data.path=<script>alert(1)</script>", r"data.path=$\frac{1}$").html()
    assert "<script" not in html and "&lt;script&gt;" in html
    assert r"$\frac{1}$" in html


def test_a_memory_page_says_what_fits_and_why_a_config_does_not() -> None:
    page = memory()
    assert [table.title for table in page.tables] == ["Memory by item", "What fits"]
    assert page.tables[1].rows == [("largest capacity that fits", "capacity=9")] and page.warning is None
    job = Job(load(SMALL))
    refused = memory_page(job, estimate(job), refused="needs 9 GiB")
    assert refused.warning == "needs 9 GiB" and len(refused.tables) == 1


def test_text_is_escaped() -> None:
    page = Page(
        "a<script>&b",
        "kind",
        Headline("<em>", "<s>"),
        [("x", "<b>")],
        [Figure("<i>", "<u>")],
        [Table("t", [("<td>", "1")])],
    )
    html = page.html()
    assert not {"<script>", "<em>", "<s>", "<b>", "<i>", "<u>"} & set(re.findall(r"<\w+>", html))
    assert "<title>a&lt;script&gt;&amp;b: kind</title>" in html
