"""`profile-data` needs no GPU and no torch, and its JSON has the keys that others read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bytescale_cli import profile_data
from bytescale_cli.main import run
from engine.planner.planners import PLANNERS
from tests.bytescale_cli.failures import failed

PROMISED = {"samples", "tokens", "p50", "p90", "p99", "max", "buckets", "suggested_capacity", "suggested_ring_limit"}
SMALL = ["lengths=github", "lengths.max=8K", "batch_tokens=32K", "context=8K", "capacity=2K"]


def profiled(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["profile-data", "cluster.ranks_per_node=4", *arguments, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.fixture
def folder(tmp_path: Path) -> list[str]:
    for number in range(30):
        (tmp_path / f"{number:02d}.txt").write_bytes(b"x" * 100 * number)
    return ["recipe=quickstart", "data=folder", f"data.path={tmp_path}", "batch_tokens=4K"]


def test_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    answer = profiled(capsys, *SMALL, "--sample", "3000")
    data = answer["data"]
    assert set(data) >= PROMISED
    assert data["samples"] == sum(bucket["samples"] for bucket in data["buckets"]) == 3000
    assert data["tokens"] == sum(bucket["tokens"] for bucket in data["buckets"])
    assert set(data["buckets"][0]) == {"upto", "samples", "tokens"}
    assert data["p50"] <= data["p90"] <= data["p99"] <= data["max"] <= 8192


def test_each_planner_makes_its_plan_at_the_suggested_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    answer = profiled(capsys, *SMALL)
    planned = answer["planners"]
    assert [fact["planner"] for fact in planned] == list(PLANNERS)
    assert len({fact["tokens"] for fact in planned}) == 1
    for fact in planned:
        assert set(fact) >= {"balance", "max_degree", "ring_bytes"}
        assert 1 <= fact["max_degree"] <= 4


def test_a_recipes_own_documents(folder: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    data = profiled(capsys, *folder)["data"]
    assert (data["samples"], data["empty"], data["max"]) == (29, 1, 2901)
    part = profiled(capsys, *folder, "--sample", "15")["data"]
    assert part["read"]["share"] == 0.5
    assert part["samples"] == 2 * part["read"]["samples"]


def test_a_file_of_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("5\n600\n", encoding="utf-8")
    data = profiled(capsys, "lengths=file", f"lengths.path={tmp_path / 'a.txt'}")["data"]
    assert (data["samples"], data["tokens"]) == (2, 605)
    (tmp_path / "a.txt").write_text("5\n0\n-1\n", encoding="utf-8")
    words = ["profile-data", "lengths=file", f"lengths.path={tmp_path / 'a.txt'}"]
    failed(capsys, words, 4, f"{tmp_path / 'a.txt'}:2", f"{tmp_path / 'a.txt'}:3")


def test_people_get_a_histogram_and_advice(folder: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile-data", *folder]) == 0
    text = capsys.readouterr().out
    assert "29 documents, 43,529 tokens; 1 more is empty" in text
    assert "up to  documents" in text
    assert "suggested capacity=2K" in text
    assert "balanced" in text
    assert run(["profile-data", *folder, "--sample", "10"]) == 0
    assert "10 documents, 33.33% of the source" in capsys.readouterr().out


def test_a_context_that_no_capacity_holds(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["lengths=github", "cluster.device_memory=526M", "cluster.headroom=0", "context=2K", "--sample", "100"]
    assert run(["profile-data", *own]) == 10
    assert "the context does not fit: each of 2 ranks would have to hold 1K tokens" in capsys.readouterr().out
    answer = failed(capsys, ["profile-data", *own], 10, "cluster.device_memory")
    assert answer["data"]["fits"] is False
    assert answer["planners"] == []


@pytest.fixture
def two_sources(tmp_path: Path) -> list[str]:
    """A mixture of 3/4 of the tokens from short documents, and 1/4 from long ones."""
    for name, size in (("web", 99), ("code", 2999)):
        (tmp_path / name).mkdir()
        for number in range(10):
            (tmp_path / name / f"{number}.txt").write_bytes(b"x" * size)
    sources = [f"data.sources.{name}.path={tmp_path / name}" for name in ("web", "code")]
    return ["data=folder", *sources, "data.mix={web: 3, code: 1}", "context=4K", "capacity=4K", "batch_tokens=400K"]


def test_each_source_has_a_row_and_the_total_is_the_mixture(
    two_sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    answer = profiled(capsys, *two_sources, "--plot", str(page))
    data = answer["data"]
    shown = [
        [one[key] for key in ("name", "samples", "tokens", "p50", "p99", "max", "share")] for one in data["sources"]
    ]
    assert shown == [["web", 10, 1000, 100, 100, 100, 0.75], ["code", 10, 30000, 3000, 3000, 3000, 0.25]]
    assert (data["tokens"], data["samples"]) == (31000, round(31000 * (0.75 / 100 + 0.25 / 3000)))
    assert [bucket["tokens"] for bucket in data["buckets"] if bucket["tokens"]] == [23250, 7750]
    assert (data["p50"], data["max"]) == (100, 3000), "99 % of the documents are short"
    tokens, sequences = answer["planners"][0]["tokens"], answer["planners"][0]["sequences"]
    long = (tokens - 100 * sequences) / 2900
    assert 3000 * long / tokens == pytest.approx(0.25, abs=0.1), "the step is of the mixture, too"
    assert "of the mixture" in page.read_text(encoding="utf-8")


def test_people_see_the_sources(two_sources: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile-data", *two_sources]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "data.sources=web, code: 20 documents, 31,000 tokens"
    assert [line.split() for line in lines[2:5]] == [
        ["source", "documents", "tokens", "p50", "p99", "longest", "of", "the", "mixture"],
        ["web", "10", "1,000", "100", "100", "100", "75.0%"],
        ["code", "10", "30,000", "3,000", "3,000", "3,000", "25.0%"],
    ]
    assert lines[5] == "mixture: 235 documents have 31,000 tokens"


def test_without_documents_it_says_whose_these_are(folder: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile-data", "--sample", "5"]) == 0
    yours = "for other documents: bytescale profile-data data.path=FILE (docs/data.md)"
    assert capsys.readouterr().err == (
        f"no documents are named: these are data.path=stdlib-lines of recipe=quickstart; {yours}\n"
    )
    assert run(["profile-data", "recipe=llama7b-256k", "--sample", "5"]) == 0
    assert f"these are lengths=github of recipe=llama7b-256k; {yours}" in capsys.readouterr().err
    for named in (folder, ["lengths=github"]):
        assert run(["profile-data", *named, "--sample", "5"]) == 0
        assert capsys.readouterr().err == ""


def test_planners_that_need_more_peers_than_allowed_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    answer = profiled(capsys, *SMALL, "planner=static", "planner.max_peers=2", "--sample", "100")
    assert [fact["planner"] for fact in answer["planners"]] == ["static"]


def test_progress_is_told_from_time_to_time(
    folder: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["profile-data", *folder]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(profile_data, "_SECONDS", 0.0)
    assert run(["profile-data", *folder]) == 0
    assert capsys.readouterr().err == "read 100% of the documents\n"


def test_plot_writes_a_page(folder: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path.parent / f"{tmp_path.name}.html"
    data = profiled(capsys, *folder, "--plot", str(path))["data"]
    page = path.read_text(encoding="utf-8")
    assert "suggested capacity" in page and f"{data['samples']:,}" in page


def test_a_bad_place_for_the_page_is_told_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.data.lengths.document_lengths", lambda *_: pytest.fail("it read"))
    failed(capsys, ["profile-data", *SMALL, "--plot", str(tmp_path / "a.png")], 2, "--plot")


def test_the_cost_of_packing_is_measured_if_it_is_wanted(folder: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (source,) = profiled(capsys, *folder, "--cost")["data"]["sources"]
    assert (source["cost"]["blocks"], source["cost"]["documents"]) == (1, 29)
    assert source["cost"]["seconds"] > 0 and source["cost"]["memory"] > 10 << 20
    assert run(["profile-data", "cluster.ranks_per_node=4", *folder, "--cost"]) == 0
    assert "memory of a loader" in capsys.readouterr().out
    assert run(["profile-data", "cluster.ranks_per_node=4", *SMALL, "--cost", "--json"]) == 2
