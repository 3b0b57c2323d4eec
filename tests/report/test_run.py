from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from engine.errors import ConfigError, StorageError
from engine.planner.plan.step_plan import StepPlan
from engine.report.run import read_run
from engine.report.run_page import write_report
from tests.refusals import refused
from tests.report.elements import Elements
from tests.report.runs import metrics, plan, spans, write_run

NAMESPACE = re.compile(r'xmlns(:xlink)?="http://www\.w3\.org/[^"]*"')
OTHERS = ["Tokens per second in each step", "Learning rate", "Gradient norm", "Waits"]
LOADING = ("src", "srcset", "href", "data", "action", "poster", "background")


def page(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def titles(text: str) -> list[str]:
    """Titles of the page's pictures; each is drawn in two sizes and listed once."""
    return list(dict.fromkeys(re.findall(r'<title id="[^"]*">([^<]*)</title>', text)))


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with all pictures."""
    return page(write_run(tmp_path_factory.mktemp("run"), lines=metrics(30), traced=plan(2)))


def test_the_page_contains_its_pictures(full_page: str) -> None:
    assert titles(full_page) == ["Loss at each step", "Timeline of a step", *OTHERS]
    assert full_page.count("<svg ") == 8  # the first two in two sizes, the others half as wide as the page
    assert full_page.count("<figcaption>") == 6


def test_the_page_loads_nothing(full_page: str) -> None:
    assert "http" not in NAMESPACE.sub("", full_page)
    assert "@import" not in full_page and not re.search(r"url\((?!#)", full_page)
    for tag, attributes in Elements(full_page).found:
        assert tag not in ("script", "link", "iframe", "object", "embed", "img")
        for name in attributes:
            value = attributes[name] or ""
            assert name.removeprefix("xlink:") not in LOADING or value.startswith("#")


def test_no_two_elements_share_an_id(full_page: str) -> None:
    """Two pictures with the same clip path would hide each other's curves."""
    ids = [attributes["id"] for _, attributes in Elements(full_page).found if "id" in attributes]
    assert len(ids) == len(set(ids)) > 0


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path, lines=metrics(30), traced=plan(2))
    assert page(folder) == page(folder)
    assert [path.name for path in tmp_path.iterdir() if "report" in path.name] == [
        "report.html"
    ]  # nothing half-written


def test_a_recipe_name_is_escaped(tmp_path: Path) -> None:
    folder = write_run(tmp_path, lines=metrics(3), traced=None)
    resolved = folder / "resolved.yaml"
    resolved.write_text(resolved.read_text().replace("recipe: quickstart", "recipe: a<script>&b"))
    text = page(folder)
    assert "<script" not in text
    assert "<title>a&lt;script&gt;&amp;b" in text


def test_a_last_line_cut_short_is_ignored(tmp_path: Path) -> None:
    folder = write_run(tmp_path, lines=metrics(5), traced=None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 1.')
    assert len(read_run(folder).lines) == 5
    assert "5 of 120" in page(folder)


@pytest.mark.parametrize("missing", ["trace.json", "plan.bin"])
def test_without_a_trace_the_page_says_so(tmp_path: Path, missing: str) -> None:
    folder = write_run(tmp_path, lines=metrics(5), traced=plan(2))
    (folder / missing).unlink()
    text = page(folder)
    assert "stopped before a complete step was measured" in text
    assert titles(text) == ["Loss at each step", *OTHERS]


def test_a_trace_of_another_plan_is_not_drawn(tmp_path: Path) -> None:
    """A crash between the two writes leaves the new plan with the old trace."""
    folder = write_run(tmp_path, lines=metrics(5), traced=plan(2))
    (folder / "plan.bin").write_bytes(plan(3).to_bytes())
    assert read_run(folder).trace is None
    assert "Timeline of a step" not in titles(page(folder))


@pytest.mark.parametrize("damaged", ["plan.bin", "trace.json", "summary.json"])
@pytest.mark.parametrize("text", [b"", b"\0" * 300, b"[]"])
def test_a_damaged_file_is_named(tmp_path: Path, damaged: str, text: bytes) -> None:
    folder = write_run(tmp_path, lines=metrics(5), traced=plan(2))
    (folder / damaged).write_bytes(text)
    with refused(StorageError, folder / damaged):
        page(folder)


def test_a_run_that_stopped_before_its_first_step_has_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path, lines=[], traced=None)
    (folder / "metrics.jsonl").unlink()
    (folder / "summary.json").unlink()
    text = page(folder)
    assert "<svg" not in text and "Key numbers" not in text
    assert "no loss to show" in text


@pytest.mark.parametrize(("ranks", "mode"), [(1, "free"), (2, "lockstep"), (300, "free")])
def test_any_number_of_ranks(tmp_path: Path, ranks: int, mode: str) -> None:
    made = plan(ranks, sequences=200, mode=mode)
    text = page(write_run(tmp_path, lines=metrics(12), traced=made))
    assert len(titles(text)) == 6
    assert f"<dd>{ranks}</dd>" in text


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(tmp_path: Path, bad: float) -> None:
    lines = metrics(12)
    lines[-1] |= {"loss": bad, "validation_loss": bad, "grad_norm": bad}
    text = page(write_run(tmp_path, lines=lines, traced=None))
    assert "The loss is not finite in 1 of 12 steps, first in step 12." in text
    assert "Loss at each step" in titles(text)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    made = plan(3)
    run = read_run(write_run(tmp_path, lines=metrics(12), traced=made))
    assert run.config.recipe == "quickstart"
    assert run.bigram_nats == 2.432
    assert run.column("step").tolist() == list(range(1, 13))
    assert run.column("validation_loss")[:9].tolist() == pytest.approx([math.nan] * 9, nan_ok=True)
    assert run.trace is not None
    assert (run.trace.step, run.trace.plan.digest) == (7, made.digest)
    assert list(run.trace.spans) == [tuple(span) for span in json.loads(json.dumps(spans(made)))]
    assert isinstance(run.trace.plan, StepPlan)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with refused(ConfigError, tmp_path / "resolved.yaml"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
