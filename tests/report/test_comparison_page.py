from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from engine.report.comparison_page import comparison_page
from engine.report.page import Page
from engine.report.run import read_run
from engine.run.launches import begin, end
from tests.report.elements import Elements
from tests.report.runs import metrics, plan, write_run


def compared(tmp_path: Path, *runs: tuple[list[dict[str, Any]], tuple[str, ...]]) -> Page:
    folders = [
        write_run(tmp_path / str(n), lines=lines, overrides=(f"run.out={tmp_path / str(n)}", *overrides), traced=None)
        for n, (lines, overrides) in enumerate(runs)
    ]
    return comparison_page([read_run(one) for one in folders], [f"run {n}" for n in range(len(runs))])


def test_runs_are_compared(tmp_path: Path) -> None:
    page = compared(tmp_path, (metrics(40), ()), (metrics(30), ("optimizer.lr=0.5", "planner=static")))
    titles = [figure.title for figure in page.figures]
    assert titles == ["Loss", "Throughput"]
    assert all("run 0" in one.wide and "run 1" in one.narrow for one in page.figures)
    numbers, configs = page.tables
    assert numbers.columns == ("", "run 0", "run 1")
    rows = {row[0]: tuple(row[1:]) for row in numbers.rows}
    assert rows["steps"] == ("40 of 120", "30 of 120")
    assert rows["training loss at step 30"] == (f"{metrics(40)[29]['loss']:.3f}", f"{metrics(30)[29]['loss']:.3f}")
    assert rows["planner"] == ("adaptive", "static")
    assert rows["time in steps"] == ("1 min 30 s", "1 min 8 s")
    assert sorted(configs.rows) == [("optimizer.lr", "0.004", "0.5"), ("planner.name", "adaptive", "static")]
    assert dict(page.head)["configs"] == "differ in 2 keys"
    assert page.headline.figure == "equally fast"


def test_the_headline_is_the_ratio_of_the_time_of_the_same_steps(tmp_path: Path) -> None:
    slow = [line | {"step_s": 2.3 * line["step_s"]} for line in metrics(40)]
    page = compared(tmp_path, (metrics(30), ()), (slow, ("planner=static",)))
    assert page.headline.figure == "2.30 times as fast"
    assert page.headline.text == (
        "adaptive is 2.30 times as fast as static: steps 2 to 30 took 150 s with static and 65.2 s with adaptive."
    )
    other = [line | {"tokens": 2 * line["tokens"], "tokens_per_s": 2 * line["tokens_per_s"]} for line in metrics(30)]
    page = compared(tmp_path, (metrics(30), ()), (other, ("cluster.ranks_per_node=4",)))
    assert page.headline.text.startswith("run 1 is 2.00 times as fast as run 0, on 4 ranks against 2: ")


def test_a_page_loads_nothing_and_no_two_elements_share_an_id(tmp_path: Path) -> None:
    html = compared(tmp_path, *[(metrics(12), (f"run.seed={n}",)) for n in range(5)]).html()
    assert "http" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", html)
    ids = [attributes["id"] for _, attributes in Elements(html).found if "id" in attributes]
    assert len(ids) == len(set(ids)) > 0


def test_runs_that_have_no_step_or_no_finite_loss(tmp_path: Path) -> None:
    bad = [line | {"loss": math.nan} for line in metrics(3)]
    page = compared(tmp_path, ([], ()), (bad, ()), (metrics(5), ()))
    assert page.warning == "No step was completed by run 0." and len(page.figures) == 2
    rows = {row[0]: tuple(row[1:]) for row in page.tables[0].rows}
    assert rows["last training loss"][:2] == ("-", "-") and "training loss at step 3" not in rows
    assert page.tables[1].rows == [] and "Only in run.out" in page.html()
    assert "nothing to draw" in compared(tmp_path, ([], ()), ([], ())).html()


def test_the_duration_is_that_of_all_starts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", lines=metrics(3), traced=plan(3))
    begin(folder / "launches.jsonl", 1, 2, ["a"])
    end(folder / "launches.jsonl")
    run = read_run(folder)
    rows = {row[0]: row[1:] for row in comparison_page([run, run], ["a", "b"]).tables[0].rows}
    assert (
        rows["duration"][0].endswith(" s")
        and tuple(rows["starts"]) == ("1", "1")
        and tuple(rows["ranks"]) == ("3", "3")
    )
