from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bytescale_cli.main import run
from engine.data.token_file import TokenFile


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("x" * number)
    return tmp_path


def test_a_folder_is_packed(documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "packed" / "a.b"
    out.parent.mkdir()
    words = ["data", "pack", "data=folder", f"data.path={documents}", "data.pattern=*.txt", "--out", str(out)]
    assert run(words) == 0
    text = capsys.readouterr().out
    assert f"{out}: 2 documents, 7 tokens of bytes, vocabulary 258; 1 empty document was left out" in text
    assert f"data=tokens data.path={out} model.vocab=258" in text
    assert TokenFile.open(out).read(1, 0, 9).tolist() == [256, *b"xx", 257]
    assert run([*words, "--json", "--workers", "1"]) == 0
    found = json.loads(capsys.readouterr().out)["pack"]
    assert (found["out"], found["documents"], found["tokens"], found["empty"]) == (str(out), 2, 7, 1)


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
        words = ["recipe=quickstart", *source, "data.validation_share=0", f"run.out={tmp_path / 'run'}"]
        assert run(["train", *words, "--dry-run", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out)["dry_run"]["steps"])
    assert answers[0] == answers[1] and answers[0]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--workers", "0"], 2, "--workers: must be at least 1, not 0"),
        (["--out", "/proc/a"], 2, "--out: /proc/a.bin cannot be written"),
        (["data=tokens", "data.path=a"], 2, "data.path=a: is a token file already"),
        (["data=folder", "data.path=/nowhere"], 4, "/nowhere: no such folder"),
    ],
)
def test_mistakes(
    words: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["data", "pack", *words]) == code
    assert message in capsys.readouterr().err


def test_a_truncated_token_file_is_refused(documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "pack", "data=folder", f"data.path={documents}", "--out", str(tmp_path / "a")]) == 0
    content = np.fromfile(tmp_path / "a.bin", dtype=np.uint8)
    content[:-1].tofile(tmp_path / "a.bin")
    words = ["train", "data=tokens", f"data.path={tmp_path / 'a'}", f"run.out={tmp_path / 'run'}", "--dry-run"]
    assert run(words) == 4
    assert f"{tmp_path / 'a.bin'}: has 13 bytes, but a.idx says 14: it was cut off" in capsys.readouterr().err
