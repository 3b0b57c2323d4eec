"""Files that would be trained on as garbage are refused, and the message says what to write instead."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import os
import shlex
import subprocess
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zstandard

from engine.config import schema
from engine.data.sources.content import recognise
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import usable
from engine.data.token_file import TokenWriter
from engine.errors import DataError
from tests.data.sources.read import texts
from tests.refusals import refused

MakeData = Callable[..., schema.Data]
WriteFiles = Callable[[Mapping[str, bytes]], Path]
LINES = b'{"text": "one"}\n{"text": "two"}\n'
TABLE = pa.table({"text": ["one", "two"]})


def parquet() -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(TABLE, file)
    return file.getvalue()


def arrow(writer: Callable[..., pa.RecordBatchFileWriter]) -> bytes:
    file = io.BytesIO()
    with writer(file, TABLE.schema) as opened:
        opened.write_table(TABLE)
    return file.getvalue()


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as opened:
        opened.writestr("a.txt", "a")
    return file.getvalue()


def saved() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(3))
    return file.getvalue()


@pytest.fixture
def index(tmp_path: Path) -> bytes:
    with TokenWriter(tmp_path / "tokens", np.uint16) as writer:
        writer.add(np.arange(5))
    return (tmp_path / "tokens.idx").read_bytes()


BINARY = [
    (gzip.compress(LINES, mtime=0), "looks like JSON lines", "data=jsonl"),
    (zstandard.ZstdCompressor().compress(LINES), "looks like JSON lines", "data=jsonl"),
    (gzip.compress(gzip.compress(LINES, mtime=0), mtime=0), "is compressed twice", "decompress it once"),
    (b"\x04\x22\x4d\x18" + LINES, "is compressed with lz4", "decompress it"),
    (parquet(), "is a Parquet file", "data=parquet"),
    (arrow(pa.ipc.new_stream), "is an Arrow file", "data=arrow"),
    (arrow(pa.ipc.new_file), "is an Arrow file", "data=arrow"),
    (zipped(), "is a zip archive", "extract it"),
    (saved(), "is a numpy array", "data=parquet data.field=input_ids"),
    (b"text" + b"\0" * 4, "contains NUL bytes, so it is not text", "data.pattern"),
    ("text in UTF-16".encode("utf-16"), "contains NUL bytes, so it is not text", "convert it to UTF-8"),
]


def few(rows: Sequence[tuple[Any, ...]], ways: Sequence[Any], chosen: Sequence[int]) -> list[Any]:
    """All rows in all ways. The first way of all rows, and all ways of the chosen rows, are not slow."""
    return [
        pytest.param(*row, way, marks=[] if way == ways[0] or number in chosen else [pytest.mark.slow])
        for way in ways
        for number, row in enumerate(rows)
    ]


def refusal(data: schema.Data) -> tuple[str, str | None, str]:
    """Message, place and hint of the error when all documents are read."""
    with pytest.raises(DataError) as caught:
        for block in FORMATS[data.format].blocks(data):
            list(usable(block))
    problem = caught.value.problems[0]
    return problem.message, problem.key, problem.hint or ""


@pytest.mark.parametrize(
    ("content", "message", "hint", "encoding"),
    few(BINARY, ["utf-8", "bytes"], chosen=(0, 4, 9)),
)
def test_binary_is_no_text(
    content: bytes, message: str, hint: str, encoding: str, write_files: WriteFiles, make_data: MakeData
) -> None:
    root = write_files({"a.txt": b"text", "b.txt": content})
    data = make_data(root, encoding=encoding)
    found = refusal(data)
    assert found[:2] == (message, str(root / "b.txt"))
    named = "data=" not in hint or "field" in hint or f"{hint} data.path={root}/b.txt" in found[2]
    assert hint in found[2] and named
    with pytest.raises(DataError, match=message):  # also if data.path is the file
        FORMATS["folder"].blocks(make_data(root / "b.txt"))


def test_a_token_file_is_no_text(index: bytes, write_files: WriteFiles, make_data: MakeData) -> None:
    message, _, hint = refusal(make_data(write_files({"a.idx": index}), encoding="bytes"))
    assert message == "is the index of a token file" and "data=tokens" in hint


@pytest.mark.parametrize(
    "content",
    [
        LINES,
        b"\xef\xbb\xbf" + LINES,
        b'{"text": "' + b"a" * 5000 + b'"}\n\n{}',
        LINES[:16],
        b"\n" + LINES,
        b"\xef\xbb\xbf \r\n\n" + LINES,
        b"\n" + LINES[:16],
    ],
)
def test_json_lines_are_no_text(content: bytes, write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files({"a.jsonl": content})
    expected = ("looks like JSON lines", str(root / "a.jsonl"), f"write data=jsonl data.path={root}")
    assert refusal(make_data(root)) == expected


@pytest.mark.parametrize(
    ("content", "form"), [(LINES, "jsonl"), (gzip.compress(LINES, mtime=0), "jsonl"), (parquet(), "parquet")]
)
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("name", ["y", "it's $(y)"])
def test_what_the_hint_says_finds_the_file(
    content: bytes, form: str, by_name: bool, name: str, write_files: WriteFiles, make_data: MakeData
) -> None:
    """The folder, if the other format would read the file there; otherwise the file. It is quoted for a shell."""
    root = write_files({"x.txt": b"text", f"{name}.{form}" if by_name else f"{name}.md": content})
    _, place, hint = refusal(make_data(root))
    path = shlex.split(hint.partition(f"data={form} data.path=")[2].partition(";")[0])[0]
    assert path == (str(root) if by_name else place)
    blocks = FORMATS[form].blocks(make_data(path, format=form, pattern=FORMATS[form].pattern))
    assert [document.text for block in blocks for document in usable(block)] == [b"one", b"two"]


@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf", b" \r\n"])
def test_an_object_over_several_lines_is_not_read_as_json_lines(
    begin: bytes, write_files: WriteFiles, make_data: MakeData
) -> None:
    content = begin + json.dumps({"text": "a"}, indent=2).encode()
    message, _, hint = refusal(make_data(write_files({"a.jsonl": content}), format="jsonl"))
    assert message == "begins with one JSON object over several lines, not JSON lines" and "jq -c ." in hint
    root = write_files({"a.jsonl": b"{\n" + LINES})  # a line that is broken, among good ones
    assert refusal(make_data(root, format="jsonl"))[0].startswith("is not JSON at column")


ARRAYS = [
    b'[{"text": "a"}]',
    b"[{}]\n",
    json.dumps([{"text": "a" * 5000}, {"text": "b"}], indent=1).encode(),
    b'\xef\xbb\xbf\n [\n  {"text": "\xc3\xa9"}\n, 7',
    b'[{"text": "a"}, {"text": "cut o',
]


@pytest.mark.parametrize(("content", "encoding"), few([(one,) for one in ARRAYS], ["utf-8", "bytes"], chosen=(0, 3)))
def test_a_json_array_of_objects_is_no_text(
    content: bytes, encoding: str, write_files: WriteFiles, make_data: MakeData
) -> None:
    """Unless the pattern names JSON files."""
    root = write_files({"a.json": content})
    message, key, hint = refusal(make_data(root, encoding=encoding))
    assert (message, key) == ("is a JSON array of objects", str(root / "a.json"))
    assert "jq -c" in hint and "data=jsonl" in hint and "data.pattern='**/*.json'" in hint
    for pattern in ("**/*.json", "a.json"):
        (block,) = FORMATS["folder"].blocks(make_data(root, encoding=encoding, pattern=pattern))
        assert [document.text for document in block.documents()] == [content]
    with refused(DataError, ".../documents/a.json"):  # these are never one text
        for block in FORMATS["folder"].blocks(make_data(write_files({"a.json": LINES}), pattern="*.json")):
            list(usable(block))


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"a": {"b": 1}}, indent=1).encode(),
        b"\n\n" + json.dumps({"a": {"b": 1}}).encode(),
        b"[{x}](link)",
        b"[{% if a %}",
        b'[{"a": 1} for a in b]',
        b"[" * 5000 + b"{",
        b"[[{}]]",
        b"[",
        b'{"a": 1}',
        b'{"a": 1}\n',
        b"[1, 2]\n",
        b"{% if a %}\n{{ b }}",
        b"{\n{\n",
        b"a\n" * 1024 + b"\0",  # beyond the first KB
        b"",
    ],
)
def test_other_files_are_text(content: bytes, write_files: WriteFiles, make_data: MakeData) -> None:
    (block,) = FORMATS["folder"].blocks(make_data(write_files({"a.json": content})))
    assert [document.text for document in block.documents()] == [content]


@pytest.mark.parametrize(
    ("content", "message", "hint", "packed"),
    few(BINARY[2:], [bytes, gzip.compress, zstandard.ZstdCompressor().compress], chosen=(2, 5, 7)),
)
def test_binary_is_not_read_as_json_lines(
    content: bytes,
    message: str,
    hint: str,
    packed: Callable[[bytes], bytes],
    write_files: WriteFiles,
    make_data: MakeData,
) -> None:
    root = write_files({"a.jsonl": packed(content)})
    found = refusal(make_data(root, format="jsonl"))
    assert found[:2] == (message, str(root / "a.jsonl")) and hint in found[2]


@pytest.mark.parametrize("content", [b'[{"text": "a"}]', b'\xef\xbb\xbf \n[\n  {"text": "a"}\n]\n'])
def test_a_json_array_is_not_read_as_json_lines(content: bytes, write_files: WriteFiles, make_data: MakeData) -> None:
    message, _, hint = refusal(make_data(write_files({"a.jsonl": content}), format="jsonl"))
    assert message == "is a JSON array, not JSON lines" and "jq -c '.[]' " in hint and hint.endswith("a.lines.jsonl")


@pytest.mark.parametrize("name", ["my array.json", "a.jsonl", "b.json.gz", "c.jsonl.bz2", "d"])
def test_the_command_of_the_hint_writes_json_lines(
    name: str, write_files: WriteFiles, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is typed as it stands. `jq` is replaced by a program that writes the same."""
    content = b'[{"text": "one"},\n{"text": "two"}]'
    packed = {".gz": gzip.compress, ".bz2": bz2.compress}.get(Path(name).suffix, bytes)(content)
    root = write_files({name: packed})
    (root / "jq").write_text("#!/bin/sh\n[ \"$1 $2\" = '-c .[]' ] && cat ${3:+\"$3\"} | tr -d '[]' | sed 's/,$//'\n")
    (root / "jq").chmod(0o755)
    monkeypatch.setenv("PATH", f"{root}:{os.environ['PATH']}")
    data = make_data(root / name, format="jsonl")
    command = refusal(data)[2].removeprefix("write an object per line: ")
    subprocess.run(command, shell=True, check=True)
    new = Path(shlex.split(command)[-1])
    assert new.name not in (name, "jq") and texts(make_data(new, format="jsonl")) == [b"one", b"two"]


@pytest.mark.parametrize("name", ["parquet", "arrow"])
@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (LINES, "is not a file in the format NAME", "data=jsonl"),
        (b"\n" + LINES, "is not a file in the format NAME", "data=jsonl"),
        (b"text", "is not a file in the format NAME", "set data.path or data.pattern to NAME files"),
        (b"", "is empty: it has 0 bytes", "write or download it again"),
        (gzip.compress(parquet(), mtime=0), "is compressed with gzip", "decompress"),
    ],
)
def test_tables_are_not_guessed(
    name: str, content: bytes, message: str, hint: str, write_files: WriteFiles, make_data: MakeData
) -> None:
    root = write_files({"a.parquet": content})
    found = refusal(make_data(root, format=name))
    assert found[:2] == (message.replace("NAME", name), str(root / "a.parquet"))
    assert hint.replace("NAME", name) in found[2]


def test_the_tables_are_distinguished(write_files: WriteFiles, make_data: MakeData) -> None:
    root = write_files({"a": parquet()})
    assert refusal(make_data(root, format="arrow"))[2] == f"write data=parquet data.path={root}/a"
    root = write_files({"a": arrow(pa.ipc.new_stream)})
    assert refusal(make_data(root, format="parquet"))[2] == f"write data=arrow data.path={root}/a"


def test_the_standard_library_is_text(make_data: MakeData) -> None:
    """The quickstart trains on it."""
    blocks = FORMATS["folder"].blocks(make_data("stdlib", pattern="**/*.py", encoding="bytes"))
    assert sum(len(list(block.documents())) for block in blocks) > 500


def test_nothing_is_said_of_text() -> None:
    assert recognise(b"") is None and recognise(LINES) is None
