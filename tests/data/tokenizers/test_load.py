"""Which tokenizer a path is, by content; and every refusal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.data.tokenizers.load import open_tokenizer
from engine.errors import DataError
from tests.refusals import refused


@pytest.mark.parametrize(
    ("name", "kind", "vocabulary", "ends"),
    [
        ("huggingface", "huggingface", 65000, (None, None)),
        ("sentencepiece", "sentencepiece", 32000, (1, 2)),
        ("llama3", "tiktoken", 128256, (128000, 128001)),
        ("tekken", "tekken", 131072, (1, 2)),
    ],
)
def test_the_kind_is_recognised_from_content(
    name: str, kind: str, vocabulary: int, ends: tuple[int, int], real: Callable[[str], Path], tmp_path: Path
) -> None:
    file = shutil.copy(real(name), tmp_path / "file")
    tokenizer = open_tokenizer(str(file))
    assert (tokenizer.kind, tokenizer.vocabulary, (tokenizer.bos, tokenizer.eos)) == (kind, vocabulary, ends)


def test_a_folder_stands_for_the_tokenizer_in_it(real: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copy(real("sentencepiece"), tmp_path / "tokenizer.model")
    assert open_tokenizer(str(tmp_path)).kind == "sentencepiece"
    shutil.copy(real("huggingface"), tmp_path / "tokenizer.json")
    assert open_tokenizer(str(tmp_path)).kind == "huggingface"


def test_a_relative_path_counts_from_the_present_folder(
    real: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(real("huggingface"), tmp_path / name / f"{name}.json")
    for name in ("a", "b"):  # the process that tries them is started in the first folder
        monkeypatch.chdir(tmp_path / name)
        assert open_tokenizer(f"{name}.json").kind == "huggingface"


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", ""),
        (b"version https://git-lfs.github.com/spec/v1\n", ""),
        (b'{"a": 1}', ""),
        (b'{"model": {"type"', "JSON"),
        (b'{"model": {"type": "BPE"}}', "tokenizer.json"),
        (b'{"config": {}, "vocab": []}', "tekken.json"),
        (b"\n\x05hello", "SentencePiece"),
        (b"\n" * 100, "SentencePiece"),
        (b"IQ== 0\nIg== 1\n", "tiktoken"),
    ],
)
def test_what_is_no_tokenizer_is_refused(content: bytes, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(content)
    with refused(DataError, f"{file}:1" if kind == "JSON" else file) as problems:
        open_tokenizer(str(file))
    assert kind in problems[0].message


def test_a_missing_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with refused(DataError, f"{tmp_path}/byte"):
        open_tokenizer(str(tmp_path / "byte"))
    with refused(DataError, tmp_path) as problems:
        open_tokenizer(str(tmp_path))
    assert "tokenizer.json" in problems[0].message


def test_llama4_is_refused_and_not_read_as_llama3(real: Callable[[str], Path]) -> None:
    with refused(DataError, real("llama4")):
        open_tokenizer(str(real("llama4")))


@pytest.mark.parametrize(
    ("package", "content"),
    [("tokenizers", b'{"model": {}}'), ("sentencepiece", b"\n\x05"), ("tiktoken", b"IQ== 0\n")],
)
def test_a_missing_library_is_named_with_its_command(
    package: str, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    monkeypatch.setitem(sys.modules, package, None)
    with refused(DataError, f"{tmp_path}/file") as problems:
        open_tokenizer(str(file))
    assert f"{package}" in problems[0].message
    assert problems[0].hint == f"pip install {package}"
