from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from bytescale_cli.main import run
from engine.config.load import load
from engine.data.token_file import TokenFile
from tests.bytescale_cli.failures import failed
from tests.data.tokenizers.chat_folder import chat_folder

SIZES = ["context=256", "capacity=256", "batch_tokens=1K"]  # steps of few documents, however short these are


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("x" * number)
    return tmp_path


def test_a_folder_is_packed(documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "packed here" / "a.b"
    words = ["data", "pack", "data=folder", f"data.path={documents}", "data.pattern=*.txt", "--out", str(out)]
    assert run(words) == 0
    text = capsys.readouterr().out
    assert f"{out}: 2 documents, 7 tokens of bytes, vocabulary 258; 1 empty document was left out" in text
    assert text.endswith(f"\nuse it with data=tokens 'data.path={out}' model.vocab=258\n")
    assert load(shlex.split(text.splitlines()[-1].removeprefix("use it with "))).data.path == str(out)
    assert TokenFile.open(out).read(1, 0, 9).tolist() == [256, *b"xx", 257]
    assert run([*words, "--json", "--workers", "1"]) == 0
    found = json.loads(capsys.readouterr().out)["pack"]
    assert (found["out"], found["documents"], found["tokens"], found["empty"]) == (str(out), 2, 7, 1)


def test_the_tokenizer_is_part_of_how_a_token_file_is_used(
    documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise nobody would know what the ids mean. Another one is refused."""
    ours, other = (chat_folder(tmp_path / name, None, size=size) for name, size in (("my own", 500), ("other", 700)))
    words = ["data=folder", f"data.path={documents}", "data.pattern=*.txt", f"data.tokenizer={ours}"]
    assert run(["data", "pack", *words, "--out", str(tmp_path / "a")]) == 0
    use = capsys.readouterr().out.splitlines()[-1]
    assert use.endswith(f" 'data.tokenizer={ours}'")
    train = ["train", "recipe=quickstart", *shlex.split(use.removeprefix("use it with ")), "--dry-run"]
    train += ["data.validation_share=0", f"run.out={tmp_path / 'run'}", *SIZES]
    assert run(train) == 0
    capsys.readouterr()
    failed(capsys, [*train, f"data.tokenizer={other}", "model.vocab=700"], 4, f"data.tokenizer={other}")


def test_training_takes_the_packed_documents(
    documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their lengths are those of the texts."""
    assert run(["data", "pack", "data=folder", f"data.path={documents}", "--out", str(tmp_path / "a")]) == 0
    capsys.readouterr()
    answers = []
    for source in (
        ["data=folder", f"data.path={documents}", "data.pattern=*.txt"],
        ["data=tokens", f"data.path={tmp_path / 'a'}"],
    ):
        words = ["recipe=quickstart", *source, "data.validation_share=0", f"run.out={tmp_path / 'run'}", *SIZES]
        assert run(["train", *words, "--dry-run", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out)["dry_run"]["steps"])
    assert answers[0] == answers[1] and answers[0]


def test_lint_reports_findings_and_exits_with_4_for_what_training_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    bad = ['{"text": 7}', '{"txt": "a"}', '{"txt": "b"}']
    path.write_text("\n".join(['{"text": "one"}', *bad, '{"text": "one"}', "", '{"text": "long"}']) + "\n")
    words = ["data", "lint", "data=jsonl", f"data.path={path}", "context=4"]
    assert run([*words, "--examples", "1"]) == 4
    out, err = capsys.readouterr()
    assert f"{path}: 7 documents, 16 tokens\n" in out and "up to  documents" in out
    expected = [
        "error L02, 1 time: documents that cannot be used: field 'text' is not a string",
        f"  {path}:2: field 'text' is not a string",
        "  hint: set data.field to a field with text, token ids, or chats",
        "",
        "error L02, 2 times: documents that cannot be used: has no field 'text'",
        f"  {path}:3: has no field 'text'",
        "  ... 1 more",
        "  hint: did you mean data.field=txt?",
        "",
        "warning L06, 1 time: empty documents",
        f"  {path}:6: is empty",
        "  hint: nothing, unless they should have text: they are left out",
        "",
        "warning L14, 1 time: copies of other documents",
        f"  {path}:5: is a copy of {path}:1",
        "  hint: remove them, unless they should count more than once",
        "",
        "warning L15, 1 time: documents longer than context",
        f"  {path}:7: has 5 tokens; context is 4",
        "  hint: raise context, unless they may be split into pieces",
    ]
    assert out.splitlines()[-len(expected) :] == expected
    hint = "hint: fix the errors above"
    assert err == f"error: data.path={path}: 3 of 7 documents cannot be trained on\n{hint}\n"
    assert run([*words, "--json", "--workers", "2"]) == 4
    answer = json.loads(capsys.readouterr().out)
    found = answer["lint"]
    assert (answer["ok"], answer["error"]["code"]) == (False, 4)
    assert (found["documents"], found["tokens"], found["refused"]) == (7, 16, 3)
    assert found["lengths"]["buckets"] == [
        {"upto": 4, "samples": 2, "tokens": 8},
        {"upto": 8, "samples": 1, "tokens": 5},
    ]
    assert found["findings"][1] == {
        "code": "L02",
        "level": "error",
        "message": "documents that cannot be used",
        "reason": "has no field 'text'",
        "count": 2,
        "examples": [{"place": f"{path}:{line}", "detail": "has no field 'text'"} for line in (3, 4)],
        "hint": "did you mean data.field=txt?",
    }


def test_lint_exits_with_0_for_warnings_and_without_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["data", "lint", "data=folder", f"data.path={tmp_path}"]
    (tmp_path / "a").write_text("one")
    assert run(words) == 0
    assert capsys.readouterr().out.endswith("\n\nno findings\n")
    (tmp_path / "b").write_text("one")
    assert run([*words, "--json"]) == 0
    assert [one["code"] for one in json.loads(capsys.readouterr().out)["lint"]["findings"]] == ["L14"]
    assert run([*words, "data.pattern=b", "model.vocab=200"]) == 4
    assert "error L05, 1 time: tokens beyond model.vocab" in capsys.readouterr().out


def test_lint_refuses_a_source_without_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_text("")
    failed(capsys, ["data", "lint", "data=folder", f"data.path={tmp_path}"], 4, f"data.path={tmp_path}")


def test_lint_counts_a_file_that_cannot_be_read_apart_from_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pages of the file are damaged, but not its footer."""
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one text", "another"]}), path, compression="none")
    path.write_bytes(b"PAR1" + b"\xff" * 40 + path.read_bytes()[44:])
    assert run(["data", "lint", "recipe=quickstart", f"data.path={path}", "--workers=1", "--json"]) == 4
    answer = json.loads(capsys.readouterr().out)
    assert (answer["lint"]["documents"], answer["lint"]["refused"]) == (0, 1)
    assert [one["code"] for one in answer["lint"]["findings"]] == ["L01"]
    assert answer["error"]["key"] == f"data.path={path}" and "1 file " in answer["error"]["message"]


def test_a_truncated_token_file_is_refused(documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "pack", "data=folder", f"data.path={documents}", "--out", str(tmp_path / "a")]) == 0
    content = np.fromfile(tmp_path / "a.bin", dtype=np.uint8)
    content[:-1].tofile(tmp_path / "a.bin")
    words = ["train", "data=tokens", f"data.path={tmp_path / 'a'}", f"run.out={tmp_path / 'run'}", "--dry-run"]
    failed(capsys, words, 4, tmp_path / "a.bin")


DOCUMENTS = ["{}", '{"text": "a document"}', '{"text": "another one, which is longer"}']
RANGES = "data.mix=[{weights: {web: 1, code: 1}, lengths: [1, 12]}, {step: 5, weights: {web: 1}, lengths: [90, 99]}]"


@pytest.mark.parametrize(
    ("web", "words", "said"),
    [
        (DOCUMENTS[1:], ["data.sources.web.transform=[{drop: {shorter: 99}}]"], "its transform leaves out all"),
        ([], [], "contains no documents"),
        ([""], [], "every document (1) is empty"),
        (DOCUMENTS[1:], [RANGES], "web has a document of 29 tokens"),
        (DOCUMENTS[1:2], [RANGES], "web has no document of 90 to 99 tokens"),
    ],
    ids=["dropped", "no documents", "empty ones", "lengths of no segment", "a segment without any"],
)
def test_lint_refuses_each_source_that_training_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], web: list[str], words: list[str], said: str
) -> None:
    words = words if RANGES in words else [*words, "data.mix={web: 1, code: 1}"]
    for name, lines in (("web", web), ("code", DOCUMENTS[1:2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
        words = [*words, f"data.sources.{name}.path={tmp_path}/{name}.jsonl"]
    assert run(["data", "lint", "data=jsonl", *words]) == 4
    out, err = capsys.readouterr()
    assert "data.sources.web" in err and said in err and "data.sources.code" not in err
    assert "no findings" not in out
    assert run(["data", "plan", "recipe=quickstart", "data=jsonl", *words, *SIZES]) == 4  # it refuses the same
    assert said in capsys.readouterr().err


def test_lint_says_that_a_transform_leaves_out_all_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(f"{DOCUMENTS[1]}\n")
    words = ["data", "lint", "data=jsonl", f"data.path={tmp_path}/a.jsonl", "data.transform=[{drop: {shorter: 99}}]"]
    assert run(words) == 4
    out, err = capsys.readouterr()
    assert "leaves out all of its documents (1)" in err and "no findings" not in out
