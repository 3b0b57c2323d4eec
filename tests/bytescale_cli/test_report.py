from __future__ import annotations

import json
from pathlib import Path

import pytest

from bytescale_cli.main import run
from tests.permissions import locked_out
from tests.report.events import checked
from tests.report.runs import metrics, plan, write_run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    made = plan(2)
    return [
        write_run(tmp_path / name, overrides=(f"run.out={tmp_path / name}",), lines=metrics(12), traced=made)
        for name in ("a", "b")
    ]


def test_a_run_has_its_page_in_its_folder(runs: list[Path], tmp_path: Path, capsys: Capture) -> None:
    trace = tmp_path / "trace.json"
    assert run(["report", str(runs[0]), "--trace", str(trace)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(runs[0] / "report.html"), str(trace)]
    assert "a ByteScale run" in (runs[0] / "report.html").read_text()
    assert {one["pid"] for one in checked(trace.read_bytes())} == {1}


def test_several_runs_are_compared(
    runs: list[Path], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["report", *map(str, runs), "--trace", "t.json", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    page = str(tmp_path / "comparison.html")
    headline = answer["report"].pop("headline")
    assert headline.startswith("a and b are equally fast")
    assert answer["report"] == {"runs": list(map(str, runs)), "page": page, "trace": str(tmp_path / "t.json")}
    text = Path(page).read_text()
    assert "a comparison of ByteScale runs" in text and "a, b" in text
    assert {one["pid"] for one in checked((tmp_path / "t.json").read_bytes())} == {1, 2}
    assert not (runs[0] / "report.html").exists()


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    both = [tmp_path / parent / "a" for parent in ("x", "y")]
    for folder in both:
        folder.parent.mkdir()
        write_run(folder, lines=metrics(2), traced=None)
    assert run(["report", *map(str, both), "--out", str(tmp_path / "c.html")]) == 0
    assert f"<h1>{both[0]}, {both[1]} " in (tmp_path / "c.html").read_text()


def test_a_run_folder_that_cannot_be_written_leads_to_out(runs: list[Path], tmp_path: Path, capsys: Capture) -> None:
    """The user did not write --out; with it the page can be elsewhere."""
    with locked_out(runs[0], 0o500):
        assert run(["report", str(runs[0])]) == 2
        said = capsys.readouterr().err.splitlines()
        assert run(["report", str(runs[0]), "--out", str(tmp_path / "page.html")]) == 0
    page = runs[0] / "report.html"
    assert said == [f"error: {page} cannot be written: Permission denied", "hint: choose another file with --out FILE"]
