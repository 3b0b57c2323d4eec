"""Files of others are read without waiting, without filling the memory, and without a traceback."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from engine.errors import ConfigError, DataError
from engine.readers import DEEPEST, parse_json, parse_line, read_bytes, read_json, read_object, read_text

# Each with the place of the mistake: the file, or one of its lines.
BAD = {
    "levels": (b"[" * 100_000, ""),
    "closed levels": (b"[" * 200 + b"]" * 200, ""),
    "levels of objects": (b'{"a":' * 100_000, ""),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", ""),
    "too large for a float": (b'{"a": ' + b"9" * 400 + b"}", ""),
    "infinity": (b'{"a": 1e999}', ""),
    "NaN": (b'{"a": NaN}', ""),
    "a key twice": (b'{"a": 1, "a": 2}', ""),
    "half a character": (b'{"a": "\\ud800"}', ""),
    "a byte order mark": (b"\xef\xbb\xbf{}", ""),
    "UTF-16": ("{}".encode("utf-16"), ""),
    "no UTF-8": (b'{\n"a": "\xff"}', ":2"),
    "no JSON": (b'{\n\n"a" 1}', ":3"),
    "nothing": (b"", ":1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_json(name: str, tmp_path: Path) -> None:
    content, line = BAD[name]
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_json(file, error=ConfigError, hint="mend it")
    (problem,) = caught.value.problems
    assert problem.key == f"{file}{line}"
    assert problem.hint and len(problem.message) < 100


def test_messages_name_the_key() -> None:
    for text, name in (
        (b'{"rope": {"theta": ' + b"9" * 400 + b"}}", "rope.theta"),
        (b'{"rope": [1, ' + b"9" * 5000 + b"]}", "rope.1"),
        (b'[{"a": 1, "b": 2, "b": 3}]', "'b'"),
    ):
        with pytest.raises(DataError, match=name):
            parse_json(text, "a")


def test_good_json_is_read() -> None:
    values = {"a": [1, -2.5, 1e300, 10**30, True, None], "\U0001f600": "\U0001f600\ud7ff", "b": {}}
    assert parse_json(json.dumps(values).encode(), "a") == values
    deep = b"[" * DEEPEST + b"]" * DEEPEST
    assert parse_json(deep, "a") == json.loads(deep)


def test_another_type_than_an_object(tmp_path: Path) -> None:
    file = tmp_path / "list.json"
    file.write_text("[1]")
    assert read_json(file) == [1]
    with pytest.raises(DataError) as caught:
        read_object(file)
    assert caught.value.problems[0].key == str(file)


def test_lines_raise_valueerror_alone() -> None:
    assert parse_line(b'{"step": 1}') == {"step": 1}
    for bad in (b"[" * 100_000, b"", b"\xff", b"9" * 5000):
        with pytest.raises(ValueError):
            parse_line(bad)


@pytest.mark.timeout(20)
def test_what_is_no_file_is_refused_without_opening_it(tmp_path: Path) -> None:
    """Opening a named pipe waits for a writer, and reading /dev/zero ends with the memory."""
    pipe, folder, circle = tmp_path / "pipe", tmp_path / "folder", tmp_path / "circle"
    os.mkfifo(pipe)
    folder.mkdir()
    circle.symlink_to(circle)
    address = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(address))
        for path in (pipe, folder, circle, address, Path("/dev/zero"), tmp_path / ("x" * 300), Path("a\0b")):
            with pytest.raises(DataError) as caught:
                read_bytes(path)
            (problem,) = caught.value.problems
            assert problem.key == str(path)
            assert problem.hint


def test_links_to_files_are_files(tmp_path: Path) -> None:
    """The cache of Hugging Face consists of links."""
    (tmp_path / "blob").write_bytes(b"\xef\xbb\xbfa\n")
    (tmp_path / "link").symlink_to("blob")
    assert read_text(tmp_path / "link") == "a\n"


def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "large"
    with file.open("wb") as opened:
        opened.truncate(3 << 30)
    with pytest.raises(DataError) as caught:
        read_bytes(file)
    assert caught.value.problems[0].key == str(file)


def test_missing_and_forbidden_files_are_left_to_the_caller(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")
