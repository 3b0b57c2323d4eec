from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from engine.config import schema
from engine.data.index import build_index
from engine.data.reader import Reader
from engine.data.tokenizer import BOS, EOS, encode
from engine.errors import DataError

MakeData = Callable[..., schema.Data]
WriteFiles = Callable[[Mapping[str, bytes]], Path]


def test_every_span_equals_that_of_the_document(write_files: WriteFiles, make_data: MakeData) -> None:
    data = make_data(write_files({"a": b"", "b": b"hello"}))
    reader, tokens = Reader(data, build_index(data)), encode(b"hello")
    for start in range(len(tokens)):
        for stop in range(start + 1, len(tokens) + 1):
            assert reader.tokens(0, start, stop).tolist() == tokens[start:stop].tolist()


def test_the_ends_are_bos_and_eos(write_files: WriteFiles, make_data: MakeData) -> None:
    data = make_data(write_files({"a": b"x"}))
    reader = Reader(data, build_index(data))
    assert reader.tokens(0, 0, 1).tolist() == [BOS]
    assert reader.tokens(0, 2, 3).tolist() == [EOS]


def test_a_span_reads_only_its_bytes(
    write_files: WriteFiles, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_data(write_files({"a": b"0123456789"}))
    reader = Reader(data, build_index(data))
    spans: list[tuple[int, int]] = []
    read_span = reader._source.read_span

    def note(document: int, start: int, stop: int) -> bytes:
        spans.append((start, stop))
        return read_span(document, start, stop)

    monkeypatch.setattr(reader._source, "read_span", note)
    reader.tokens(0, 3, 6)
    assert spans == [(2, 5)]


def test_added_files_do_not_matter(write_files: WriteFiles, make_data: MakeData) -> None:
    data = make_data(write_files({"b": b"hello"}))
    index = build_index(data)
    write_files({"a": b"new"})
    assert Reader(data, index).tokens(0, 1, 6).tobytes() == encode(b"hello")[1:-1].tobytes()


def test_a_file_that_became_shorter_is_refused(write_files: WriteFiles, make_data: MakeData) -> None:
    data = make_data(write_files({"a": b"hello"}))
    reader = Reader(data, build_index(data))
    root = write_files({"a": b"hell"})
    assert reader.tokens(0, 1, 5).tolist() == list(b"hell")
    with pytest.raises(DataError, match="is shorter than at the start of the run") as caught:
        reader.tokens(0, 4, 7)
    assert caught.value.problems[0].key == str(root / "a")


def test_a_line_that_became_shorter_is_refused(tmp_path: Path, make_data: MakeData) -> None:
    path = tmp_path / "a.jsonl"
    data = make_data(path, format="jsonl")
    path.write_bytes(b'{"text": "hello"}\n')
    index = build_index(data)
    path.write_bytes(b'{"text": "hell"}\n')
    with pytest.raises(DataError, match="is shorter than at the start of the run") as caught:
        Reader(data, index).tokens(0, 0, 7)
    assert caught.value.problems[0].key == f"{path}:1"


def test_a_removed_document_is_refused(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files({"a": b"hello", "b": b"x"})
    data = make_data(root)
    index = build_index(data)
    (root / "a").unlink()
    with pytest.raises(DataError, match="was removed after the run started") as caught:
        Reader(data, index).tokens(0, 0, 1)
    assert caught.value.problems[0].key == "a"
