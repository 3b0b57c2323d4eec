"""Documents from a JSONL file: each line is a JSON object with the text of one document in a field."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from engine.config import schema
from engine.config.spelling import nearest
from engine.data.sources.files import kind, reading
from engine.data.sources.source import Block, Document, choose
from engine.errors import DataError

_PARSED_LINES = 8  # a rank reads the spans of a document soon after each other, so a small cache avoids most parsing
_MOST_BYTES = 1 << 30  # bytes of a file that `profile-data` reads without --sample, in seconds
_BLOCK_BYTES = 16 << 20
_SAMPLED_BYTES = 64 << 10  # a sample consists of random parts of this size, each with the lines that begin in it
_PILOT = 256  # parts to read to estimate the number of documents per part


class JsonlSource:
    """The documents of a JSONL file, one per non-blank line. Their names are `file:line`."""

    def __init__(self, data: schema.Data) -> None:
        self._path = _file(data)
        self._field = data.field
        self._lines: list[int] = []  # line number of each document, from 1
        self._offsets: list[int] = []
        self.blank = 0
        with reading(self._path) as file:
            for number, (offset, line) in enumerate(lines(file, 0, sys.maxsize), start=1):
                if line.isspace():
                    self.blank += 1
                else:
                    self._lines.append(number)
                    self._offsets.append(offset)
        self.names = tuple(f"{self._path.name}:{line}" for line in self._lines)
        self._text = lru_cache(_PARSED_LINES)(self._parse)
        if not self.names:
            raise DataError("contains no documents", key=data.path, hint="set data.path to another file")

    def place(self, document: int) -> str:
        """Return the path of the file and the line number of a document, as `path:line`."""
        return f"{self._path}:{self._lines[document]}"

    def read(self, document: int) -> bytes:
        """Return a document's text in UTF-8. Raises DataError if its line is not a JSON object with the text field."""
        return self._text(document)

    def read_span(self, document: int, start: int, stop: int) -> bytes:
        """Return bytes start .. stop - 1 of a document's text in UTF-8; fewer if the text is shorter."""
        return self._text(document)[start:stop]

    def _parse(self, document: int) -> bytes:
        """Read and parse the line of a document; `_text` caches the result."""
        with reading(self._path) as file:
            file.seek(self._offsets[document])
            line = file.readline().rstrip(b"\r\n")
        return text_of(line, self._field, self.place(document))


@dataclass(frozen=True)
class JsonlBlock:
    """The lines of a file that begin in one of several byte ranges."""

    path: Path
    field: str
    ranges: Sequence[tuple[int, int]]

    @property
    def files(self) -> list[Path]:
        return [self.path]

    def documents(self) -> Iterator[Document]:
        """Read each line; a blank one has an empty text. Raises DataError as `text_of` does."""
        with reading(self.path) as file:
            for at, line in (found for start, stop in self.ranges for found in lines(file, start, stop)):
                place, text = f"{self.path}:byte {at}", b""
                if not line.isspace():
                    try:
                        text = text_of(line.rstrip(b"\r\n"), self.field, place)
                    except DataError:
                        # Raise it again with the line number, which needs a pass over the file up to this line.
                        text_of(line.rstrip(b"\r\n"), self.field, f"{self.path}:{_line_number(self.path, at)}")
                yield Document(place, text)


def jsonl_blocks(data: schema.Data) -> list[Block]:
    """Split a file into blocks of 16 MiB, each with the lines that begin in it."""
    path = _file(data)
    with reading(path) as file:
        size = file.seek(0, os.SEEK_END)
    return [JsonlBlock(path, data.field, [part]) for part in _ranges(size, _BLOCK_BYTES)]


def jsonl_sample(data: schema.Data, sample: int | None, seed: int) -> tuple[list[Block], float]:
    """Choose random parts of a file with about `sample` documents; without `sample`, all of it, but at most 1 GiB.

    Returns blocks, and the fraction of the file's bytes that they contain. A part consists of the lines that begin in
    it, so all lines are chosen with the same probability.
    """
    path = _file(data)
    with reading(path) as file:
        size = file.seek(0, os.SEEK_END)
    if size == 0 or (sample is None and size <= _MOST_BYTES):
        return jsonl_blocks(data), 1.0
    ranges = _ranges(size, _SAMPLED_BYTES)
    count = _MOST_BYTES // _SAMPLED_BYTES
    if sample is not None:
        pilot = choose(len(ranges), min(_PILOT, len(ranges)), seed)
        found = sum(1 for _ in JsonlBlock(path, data.field, [ranges[number] for number in pilot]).documents())
        count = -int(-sample * len(pilot) // max(1, found))
    count = min(len(ranges), count)
    chosen = [ranges[number] for number in choose(len(ranges), count, seed)]
    together = _BLOCK_BYTES // _SAMPLED_BYTES
    blocks: list[Block] = [
        JsonlBlock(path, data.field, chosen[first : first + together]) for first in range(0, count, together)
    ]
    return blocks, sum(stop - start for start, stop in chosen) / size


def lines(file: BinaryIO, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each line that begins at an offset in start .. stop - 1."""
    at = start
    if start > 0:
        # Begin one byte earlier, so that a line that begins exactly at `start` is not skipped as the rest of another.
        file.seek(start - 1)
        at += len(file.readline(stop - start + 1)) - 1
    file.seek(at)
    while at < stop and (line := file.readline()):
        yield at, line
        at += len(line)


def text_of(line: bytes, field: str, place: str) -> bytes:
    """Return the text in `field` of a JSONL line, in UTF-8. Raises DataError, which names `place`, if it has none."""
    fix = "fix or remove the line"
    try:
        record: object = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 at byte {error.start} of the line"
        raise DataError(message, key=place, hint="convert the file to UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"is not JSON at column {error.colno}: {error.msg}", key=place, hint=fix) from error
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits, or deep nesting
        raise DataError("contains JSON that Python cannot parse", key=place, hint=fix) from error

    if not isinstance(record, dict):
        raise DataError("is not a JSON object", key=place, hint=f'write {{"{field}": "..."}} on each line')
    if field not in record:
        close, fields = nearest(field, list(record)), ", ".join(map(repr, list(record)[:8]))
        hint = f"did you mean data.field={close}?" if close is not None else f"set data.field to one of {fields}"
        raise DataError(f"has no field {field!r}", key=place, hint=hint if record else "the object is empty")
    text = record[field]
    if not isinstance(text, str):
        message = f"field {field!r} is not a string"
        raise DataError(message, key=place, hint="set data.field to a field that contains text")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(text[error.start]):04x}"
        message = f"contains an unpaired surrogate, {surrogate}, at character {error.start} of its text"
        raise DataError(message, key=place, hint=fix) from error


def _file(data: schema.Data) -> Path:
    """Return the path of the JSONL file. Raises DataError if there is no such file."""
    path = Path(data.path)
    found = kind(path)
    if found == "missing":
        raise DataError("no such file", key=data.path, hint="set data.path to a .jsonl file")
    if found == "folder":
        raise DataError("is a folder, not a file", key=data.path, hint="data.format=folder reads its files")
    return path


def _ranges(size: int, step: int) -> list[tuple[int, int]]:
    """Split 0 .. size - 1 into ranges (start, stop) of `step`; the last one may be shorter."""
    return [(start, min(size, start + step)) for start in range(0, size, step)]


def _line_number(path: Path, offset: int) -> int:
    """Return the number, from 1, of the line that begins at an offset."""
    number, left = 1, offset
    with reading(path) as file:
        while left > 0 and (chunk := file.read(min(left, _BLOCK_BYTES))):
            number += chunk.count(b"\n")
            left -= len(chunk)
    return number
