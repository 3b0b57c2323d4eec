from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import schema
from engine.data.sources import jsonl
from engine.errors import DataError
from tests.data.sources.read import documents, texts
from tests.refusals import refused

MakeData = Callable[..., schema.Data]


def write(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "corpus.jsonl").write_bytes(content)
    return tmp_path / "corpus.jsonl"


def test_lines_are_documents_and_blank_ones_are_empty(tmp_path: Path, make_data: MakeData) -> None:
    path = write(tmp_path, '{"text": "one"}\n\n{"id": 2, "text": "zwölf\\n"}\r\n  \n{"text": ""}'.encode())
    found = documents(make_data(path, format="jsonl"))
    assert [document.text for document in found] == [b"one", b"", "zwölf\n".encode(), b"", b""]
    assert found[2].place == f"{path}:byte 17"


def test_the_field_can_be_chosen(tmp_path: Path, make_data: MakeData) -> None:
    path = write(tmp_path, b'{"content": "one", "text": "two"}')
    assert texts(make_data(path, format="jsonl", field="content")) == [b"one"]


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "a" "b"}',
        b'{"text": "a',
        b'["text"]',
        b'{"txt": "a"}',
        b'{"body": "a", "id": 1}',
        b"{}",
        b'{"text": 7}',
        b'{"text": null}',
        b'{"text": "caf\xe9"}',
        b'{"text": "ab\\ud83d"}',
        b"[" * 200_000,
    ],
    ids=lambda line: line[:20].decode("latin-1"),
)
def test_a_bad_line_is_refused_by_its_number(line: bytes, tmp_path: Path, make_data: MakeData) -> None:
    path = write(tmp_path, b'{"text": "good"}\n\n' + line + b"\n")
    with refused(DataError, f"{path}:3"):
        documents(make_data(path, format="jsonl"))


def test_the_number_of_a_line_is_found_when_it_is_asked_for(
    tmp_path: Path, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a pass over the file, which thousands of bad lines must not take each."""
    path = write(tmp_path, b'{"text": "a"}\n' + b"{\n" * 50 + b'{"text": "b"}\n')
    passes, found_by = list[str](), jsonl.line_places
    monkeypatch.setattr(jsonl, "line_places", lambda path, at: passes.append(path) or found_by(path, at))
    (block,) = jsonl.jsonl_blocks(make_data(path, format="jsonl"))
    found = list(block.documents())
    assert [document.text for document in found] == [b"a", *[None] * 50, b"b"] and not passes
    assert found[49].place == f"{path}:byte {14 + 48 * 2}"
    assert block.where(found[49].place) == f"{path}:50" and len(passes) == 1


def test_lines_are_numbered_in_one_pass_and_found_by_their_numbers(tmp_path: Path) -> None:
    content = b'{"text": "a"}\n\n{"text": "\xc3\xa9"}\r\n{"text": "b"}'
    path = str(write(tmp_path, content))
    offsets = [0, *(at + 1 for at, byte in enumerate(content) if byte == 10)]
    places = [f"{path}:byte {offset}" for offset in offsets]
    assert jsonl.line_places(path, reversed(places)) == {
        place: f"{path}:{number}" for number, place in enumerate(places, start=1)
    }
    assert [jsonl.byte_place(path, number) for number in (1, 2, 3, 4, 5)] == [*places, None]


def test_a_missing_file_is_refused(tmp_path: Path, make_data: MakeData) -> None:
    with refused(DataError, f"{tmp_path}/none.jsonl"):
        documents(make_data(tmp_path / "none.jsonl", format="jsonl"))
