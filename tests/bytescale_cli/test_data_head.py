from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bytescale_cli.main import run
from tests.data.past_run import run_of
from tests.data.tokenizers.chat_folder import CHATML, chat_folder

SIZES = ["context=256", "capacity=256", "batch_tokens=1K"]  # steps of few documents, however short these are


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Three documents of bytes; only the bytes of "yes" count in the loss."""
    rows: list[dict[str, Any]] = [
        {"input_ids": list(f"{number}?yes\n\x1b[31m".encode()), "loss_mask": [0, 0, 1, 1, 1, *[0] * 6]}
        for number in range(3)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    places = ["data=jsonl", f"data.path={tmp_path / 'a.jsonl'}", "data.field=input_ids", "data.validation_share=0"]
    return [*places, "context=16", "capacity=16", "batch_tokens=16"]


def test_text_that_does_not_count_is_in_brackets(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control characters cannot change what the terminal shows. A step of a run is the same as that of its config."""
    run_of(tmp_path, *words, steps=3)
    cache = [f"data.cache={tmp_path / 'cache'}"]
    for step in (1, 2, 3):
        assert run(["data", "head", "recipe=quickstart", *words, *cache, "--step", str(step)]) == 0
        text = capsys.readouterr().out
        title, blank, place, first, *rest = text.splitlines()
        number = int(first[2])
        assert title == f"step {step}: 1 sequence, 10 tokens, 3 in the loss" and not blank
        assert place == f"{tmp_path / 'a.jsonl'}:{number + 1} (data:0:{number}): 10 tokens, 3 in the loss"
        assert [first, *rest] == [f"[[{number}?]]yes[[", "\\x1b[31m]]"]
        assert run(["data", "head", "--run", str(tmp_path / "run"), "--step", str(step)]) == 0
        assert capsys.readouterr().out == text
    assert run(["data", "head", "--run", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == text, "the last finished step"


def test_json_has_ids_masks_and_the_text_as_it_is(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "head", "recipe=quickstart", *words, "--json", "--tokens", "6"]) == 0
    head = json.loads(capsys.readouterr().out)["head"]
    assert (head["step"], head["sequences"], head["tokens"], head["loss_tokens"]) == (1, 1, 10, 3)
    (one,) = head["shown"]
    assert one["ids"][1:] == list(b"?yes\n") and one["counted"] == [False, False, True, True, True, False]
    assert one["text"][1:] == [{"text": "yes", "counted": True}, {"text": "\n", "counted": False}]
    assert (one["start"], one["length"], one["inputs"], one["source"], one["problem"]) == (0, 10, 10, "data", None)


def test_sequences_that_are_not_shown_are_counted(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "head", "recipe=quickstart", *words, "batch_tokens=32", "--sequences", "2", "--tokens", "3"]
    assert run(command) == 0
    text = capsys.readouterr().out
    assert text.endswith("\n\n1 more; --sequences 3 shows all\n") and text.count("?]]y...\n") == 2


@pytest.mark.parametrize("colour", [True, False])
def test_it_is_dim_on_a_terminal(
    colour: bool, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "" if colour else "1")
    assert run(["data", "head", "recipe=quickstart", *words, "--tokens", "4"]) == 0
    assert capsys.readouterr().out.endswith("?\x1b[0mye...\n" if colour else "?]]ye...\n")


@pytest.mark.parametrize("command", [["data", "head"], ["plan"], ["simulate"], ["train", "--dry-run"]])
def test_a_cache_among_the_documents_is_refused_by_every_command_that_packs(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next command would read the packed blocks as documents."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a").write_bytes(b"one")
    words = ["data=folder", f"data.path={tmp_path / 'texts'}", "data.pattern='**/*'", f"run.out={tmp_path / 'run'}"]
    assert run([*command, *words, f"data.cache={tmp_path / 'texts' / 'cache'}", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["key"] == f"data.cache={tmp_path / 'texts' / 'cache'}"
    assert [path.name for path in (tmp_path / "texts").iterdir()] == ["a"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a chat template."""
    return chat_folder(tmp_path_factory.mktemp("tokenizers") / "tokenizer", CHATML)


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"prompt": "2 + 2 = ", "completion": "4"}, "[[<BOS>2 + 2 = ]]4<EOS>"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "]]b<|im_end|>[["),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "]]b<|im_end|>[["),
        ({"instruction": "a", "input": "", "output": "b"}, "]]b<|im_end|>[["),
        ({"input_ids": [97, 98, 99], "labels": [-100, -100, 99]}, "[[ab]]c"),
        ({"input_ids": [97, 98, 99, 0], "attention_mask": [1, 1, 1, 0]}, "[[a]]bc"),
    ],
)
def test_each_shape_of_rows_is_shown_with_what_counts(
    row: dict[str, Any], shown: str, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command, which says what it reads."""
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    words = ["data=jsonl", f"data.path={tmp_path / 'a.jsonl'}", f"data.cache={tmp_path / 'cache'}"]
    if shown.startswith("]]"):
        words += [f"data.tokenizer={chats}", "model.vocab=400"]
    words += ["data.validation_share=0", *SIZES]
    assert run(["data", "head", "recipe=quickstart", *words, "--sequences", "1"]) == 0
    captured = capsys.readouterr()
    assert shown in captured.out and f"{tmp_path / 'a.jsonl'} has no field 'text'" in captured.err
    assert "data.field=" in captured.err
