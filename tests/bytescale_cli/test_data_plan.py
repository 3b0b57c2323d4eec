from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bytescale_cli.main import run


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Documents of 9 and 99 inputs, 40 of each."""
    for name, length in (("web", 8), ("code", 98)):
        rows = (json.dumps({"text": f"{number:0{length}}"}) for number in range(40))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    sources = [f"data.sources.{name}.path={tmp_path / name}.jsonl" for name in ("web", "code")]
    mix = "data.mix=[{weights: {web: 1, code: 1}}, {step: 4, weights: {code: 1}, schedule: cosine}]"
    sizes = ["context=64", "capacity=64", "batch_tokens=256", "data.validation_share=0", "run.steps=10"]
    return ["data", "plan", "data=jsonl", *sources, mix, *sizes, "data.sources.web.exhausted=drop"]


def planned(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert run([*words, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_stages_of_a_mixture(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(words, capsys)["data_plan"]
    assert {one["name"]: (one["documents"], one["tokens"], one["longest"]) for one in found["sources"]} == {
        "web": (40, 360, 9),
        "code": (40, 3960, 99),
    }
    assert not any(one["estimated"] for one in found["sources"]) and found["steps"] == 10 and found["ends"] is None
    first, second = found["stages"]
    assert (first["step"], first["steps"], first["schedule"], first["fits"]) == (0, 4, "cosine", True)
    assert (second["step"], second["steps"], second["longest_document"], second["longest_sequence"]) == (4, 6, 99, 64)
    assert [one["name"] for one in second["sources"]] == ["code"] and second["sources"][0]["share"] == 1
    web, code = first["sources"]
    assert 0.2 < web["share"] < 0.5 and web["share"] + code["share"] == pytest.approx(1)
    assert run(words) == 0
    text = capsys.readouterr().out
    assert "about" in text and "segment" in text and "cosine" in text
    assert "2: not reached" not in text
    assert run([*words, "run.steps=3"]) == 0
    assert "2: not reached in 3 steps" in capsys.readouterr().out


def test_a_source_may_be_used_up_for_the_lengths_of_a_segment(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    mix = "data.mix=[{weights: {web: 1}, lengths: [1, 10]}, {step: 3, weights: {web: 1, code: 1}}]"
    sources = planned([*words, mix], capsys)["data_plan"]["sources"]
    web, code = (one["used_up"] for one in sources)
    assert (web["lengths"], web["step"], code) == ([1, 10], 1, None)


def test_a_source_that_is_used_up_and_the_end_of_the_run(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    more = ["run.steps=100", "data.sources.code.exhausted=stop"]
    found = planned([*words, *more], capsys)["data_plan"]
    ends = found["ends"]
    assert (ends["source"], ends["exhausted"]) == ("code", "stop") and 15 <= ends["step"] <= 25
    assert ends["tokens"] == found["tokens"] and found["steps"] == ends["step"]
    (code,) = (one for one in found["sources"] if one["name"] == "code")
    assert code["used_up"] == ends and code["epochs"] == pytest.approx(1)
    assert run([*words, *more]) == 0
    assert f"{ends['tokens']:,} tokens of the run;" in capsys.readouterr().out


def test_what_the_cluster_does_not_hold(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = planned([*words, "context=4K", "capacity=32", "cluster.ranks_per_node=1"], capsys, code=10)
    assert [one["fits"] for one in found["data_plan"]["stages"]] == [False, False]


def test_a_sample_is_said_to_be_one(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert planned([*words, "--sample", "20"], capsys)["data_plan"]["sources"]
    assert planned([*words, "--sample", "0"], capsys, code=2)["error"]["key"] == "--sample"


def test_lengths_without_documents_have_no_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(["data", "plan", "recipe=llama7b-256k"], capsys, code=2)["error"]["key"] == "lengths"
