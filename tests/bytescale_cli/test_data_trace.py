from __future__ import annotations

import json
from pathlib import Path

import pytest

from bytescale_cli.main import run
from tests.bytescale_cli.failures import failed
from tests.data.past_run import run_of


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run of two steps on three lines, of which the second one is empty."""
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n\n{"text": "world, again"}\n')
    places = ["data=jsonl", f"data.path={tmp_path / 'a.jsonl'}", "data.validation_share=0"]
    sizes = ["context=8", "capacity=8", "batch_tokens=16", "cluster.ranks_per_node=2"]
    return run_of(tmp_path, *places, *sizes, steps=2)[0].root


def test_the_documents_of_a_step(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text and the JSON have each sequence; both steps together have every input of both documents."""
    ranges = set()
    for step in (1, 2):
        assert run(["data", "trace", str(finished), "--step", str(step), "--json"]) == 0
        trace = json.loads(capsys.readouterr().out)["trace"]
        assert (trace["step"], trace["finished"], trace["document"]) == (step, 2, None)
        assert run(["data", "trace", str(finished), "--step", str(step)]) == 0
        title, columns, *lines = capsys.readouterr().out.splitlines()
        assert title.startswith(f"step {step}: ") and f"{trace['tokens']} tokens" in title
        assert columns.split() == ["step", "document", "inputs", "loss", "tokens", "ranks", "hash", "place"]
        assert len(lines) == len(trace["sequences"])
        for one, line in zip(trace["sequences"], lines, strict=True):
            assert one["id"] == f"data:0:{one['document']}" and (one["source"], one["block"]) == ("data", 0)
            assert one["place"] == f"{tmp_path / 'a.jsonl'}:{(1, 3)[one['document']]}" and one["problem"] is None
            assert one["loss_tokens"] == one["length"] and set(one["ranks"]) <= {0, 1} and one["ranks"]
            inputs = f"{one['start']} to {one['start'] + one['length'] - 1}"
            ranks = ",".join(map(str, one["ranks"]))
            cells = [str(step), one["id"], *inputs.split(), str(one["length"]), ranks, one["hash"], one["place"]]
            assert line.split() == cells
            ranges |= {(one["document"], at) for at in range(one["start"], one["start"] + one["length"])}
    assert ranges == {(0, at) for at in range(6)} | {(1, at) for at in range(13)}


def test_the_steps_of_a_document(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for document in ("data:0:1", f"{tmp_path / 'a.jsonl'}:3"):
        assert run(["data", "trace", str(finished), "--document", document, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["trace"])
    assert found[0]["sequences"] == found[1]["sequences"] != []
    assert {one["id"] for one in found[0]["sequences"]} == {"data:0:1"}
    assert run(["data", "trace", str(finished), "--document", f"{tmp_path / 'a.jsonl'}:2"]) == 0
    text = f"{tmp_path / 'a.jsonl'}:2 was in none of 2 steps of the run: it has no token to predict\n"
    assert capsys.readouterr().out == text


def test_a_long_answer_is_cut_and_says_how_to_see_the_rest(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that has several documents stands for all of them. The JSON has all sequences."""

    def answer(*words: str) -> list[str]:
        assert run(["data", "trace", str(finished), *words]) == 0
        return capsys.readouterr().out.splitlines()

    file = str(tmp_path / "a.jsonl")
    (whole,) = answer("--document", file, "--sequences", "1", "--json")
    found = json.loads(whole)["trace"]["sequences"]
    count, third = len(found), found[2]["id"]
    assert count >= 3 and {one["id"] for one in found} == {"data:0:0", "data:0:1"}
    title, columns, *lines = answer("--document", file)
    assert len(lines) == count and f"2 documents in {count} sequences" in title
    cut = answer("--document", file, "--sequences", "2")
    more = f"{count - 2} more; --sequences {count} shows all, --document {third} one document"
    assert [" ".join(line.split()) for line in cut] == [
        *(" ".join(line.split()) for line in (title, columns, *lines[:2])),
        more,
    ]
    assert len(answer("--document", file, "--sequences", str(count))) == len(lines) + 2
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n\n{"text": "other, again"}\n')
    of_one = [one for one in found if one["id"] == "data:0:1"]
    cut = answer("--document", "data:0:1", "--sequences", "1")
    assert cut[-2] == "data:0:1: its content has changed since the step"
    rest = len(of_one) - 1
    assert cut[-1] == f"{rest} more, {rest} of them with a problem; --sequences {len(of_one)} shows all"


def test_changed_documents_are_marked(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "hullo"}\n\n{"text": "world, again"}\n')
    assert run(["data", "trace", str(finished), "--document", "data:0:0"]) == 0
    assert "data:0:0: its content has changed since the step\n" in capsys.readouterr().out
    (tmp_path / "a.jsonl").unlink()
    assert run(["data", "trace", str(finished), "--document", "data:0:0"]) == 0
    text = capsys.readouterr().out
    assert f"data:0:0: {tmp_path / 'a.jsonl'}: cannot be read: No such file or directory\n" in text


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed(capsys, ["data", "trace", str(tmp_path), "--step", "1"], 2, tmp_path)


def test_a_step_that_is_no_longer_in_the_ledger_is_a_data_error(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (finished / "ledger").glob("*.bin"):
        path.write_bytes(b"")
    assert run(["data", "trace", str(finished), "--step", "1", "--json"]) == 4
    assert "step 1" in json.loads(capsys.readouterr().out)["error"]["message"]
