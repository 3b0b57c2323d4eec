"""Documents from JSONL files: each line is a JSON object with one document in a field: a text, token ids, or a chat.

Files may be compressed (compressed.py). A compressed file is one block, because it cannot be entered in the middle.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any, BinaryIO, cast

from engine.config import schema
from engine.data.sources.compressed import MOST_BYTES, compression, unpacked
from engine.data.sources.content import HEAD, check
from engine.data.sources.files import find, reading
from engine.data.sources.rows import chosen_field, read_lately_of, row_document
from engine.data.sources.source import Block, Document, sample_blocks
from engine.errors import DataError
from engine.readers import parse_line

_BLOCK_BYTES = 1 << 20
_FIRST_BYTES = 64 << 20  # of a first line, to see which fields it has
_SAMPLED_BYTES = 64 << 10  # a sample consists of random parts of this size, each with the lines that begin in it
_AT = ":byte "  # in places, between the path and where the line begins


@dataclass(frozen=True)
class JsonlBlock(Block):
    """The lines of a file that begin in one of several ranges of bytes, after decompression."""

    path: str
    field: str
    ranges: tuple[tuple[int, int], ...]
    length: int  # bytes in the file
    read_lately: str = ""  # see rows.py
    transform: str = dataclasses.field(default="", repr=False)

    @property
    def files(self) -> list[str]:
        return [self.path]

    @property
    def size(self) -> int:
        return self.length

    def documents(self) -> Iterator[Document]:
        """Read each line; a blank one has an empty text. Raises DataError for a file that was cut off or damaged."""
        with unpacked(self.path) as file:
            for at, line in (found for start, stop in self.ranges for found in lines(file, start, stop)):
                place = f"{self.path}{_AT}{at}"
                if len(line) == MOST_BYTES:
                    raise DataError("is a line of more than 1 GiB", key=place, hint="write a document per line")
                try:
                    document = _document(line, at, self.field, place)
                except DataError as error:
                    document = Document(place, None, problem=error)
                yield document

    def named(self, places: Iterable[str]) -> Mapping[str, str]:
        return line_places(self.path, places)

    def place_of(self, number: int, before: int) -> str | None:
        return f"{self.path}:{before + number + 1}"

    @property
    def continues(self) -> bool:
        return self.ranges[0][0] > 0

    def located(self, file: str, inside: str) -> str | None:
        return byte_place(file, int(inside[1:])) if inside[1:].isdecimal() else f"{file}{inside}"

    def has(self, place: str) -> bool:
        """Return whether the line at `path:byte OFFSET` begins in this block."""
        return any(start <= _offset(place) < stop for start, stop in self.ranges)


def jsonl_blocks(data: schema.Data) -> list[Block]:
    """Split files into blocks of 1 MiB, each with the lines that begin in it; a compressed file is one block."""
    return list(_split(data, _BLOCK_BYTES))


def jsonl_sample(data: schema.Data, sample: int | None, seed: int) -> tuple[list[Block], float]:
    """Choose random parts of the files with about `sample` documents; without `sample`, about 1 GiB at most.

    Returns blocks, and the fraction of the files' bytes that they contain. A part consists of the lines that begin in
    it, or it is a compressed file, so all lines are chosen with the same probability.
    """
    chosen, fraction = sample_blocks(_split(data, _SAMPLED_BYTES), sample, seed)
    if fraction == 1.0:
        return jsonl_blocks(data), fraction
    blocks: list[Block] = []
    for _, parts in groupby(cast("list[JsonlBlock]", chosen), lambda part: part.path):
        while together := list(islice(parts, _BLOCK_BYTES // _SAMPLED_BYTES)):
            ranges = tuple(one for part in together for one in part.ranges)
            size = sum(part.size for part in together)
            blocks.append(replace(together[0], ranges=ranges, length=size))
    return blocks, fraction


def _split(data: schema.Data, step: int) -> list[JsonlBlock]:
    """Return blocks of `step` bytes, or of a compressed file."""
    blocks, field, lately, chosen = list[JsonlBlock](), data.field, "", False
    for path, size, compressed in _files(data):
        if not chosen and (row := _first_row(path)):
            field = chosen_field({name: isinstance(one, list) for name, one in row.items()}, data.field, path)
            lately, chosen = read_lately_of(row, field), True
        if compressed:
            blocks.append(JsonlBlock(path, field, ((0, sys.maxsize),), size, lately))
            continue
        ranges = [(at, min(size, at + step)) for at in range(0, size, step)]
        blocks += [JsonlBlock(path, field, ((start, stop),), stop - start, lately) for start, stop in ranges]
    return blocks


def _first_row(path: str) -> dict[str, Any]:
    """Return the first object in a file; an empty one if it has no valid one."""
    with suppress(ValueError, DataError), unpacked(path) as file:
        while line := file.readline(_FIRST_BYTES):
            if line.strip():
                found = parse_line(line.removeprefix(BOM_UTF8))
                return found if isinstance(found, dict) else {}
    return {}


def _files(data: schema.Data) -> Iterator[tuple[str, int, bool]]:
    """Yield path, size and whether it is compressed of each file. Raises DataError for one that cannot be JSONL."""
    for path in find(data):
        with reading(path) as file:
            compressed = compression(file.read(HEAD)) is not None
            size = file.seek(0, os.SEEK_END)
        with unpacked(path) as file:
            check(file.read(HEAD), "jsonl", path, data.path_text, unpacked=True)
        yield path, size, compressed


def lines(file: BinaryIO, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes, at most 1 GiB, of each line that begins at an offset in start .. stop - 1."""
    at = start
    if start > 0:
        # Begin one byte earlier, so that a line that begins exactly at `start` is not skipped as the rest of another.
        file.seek(start - 1)
        at += len(file.readline(stop - start + 1)) - 1
        file.seek(at)
    while at < stop and (line := file.readline(MOST_BYTES)):
        yield at, line
        at += len(line)


def _document(line: bytes, at: int, field: str, place: str) -> Document:
    """Return the document in `field` of a line that begins at byte `at`. Raises DataError if it has none."""
    line = line.rstrip(b"\r\n") if at else line.removeprefix(BOM_UTF8).rstrip(b"\r\n")
    if not line or line.isspace():
        return Document(place, b"")
    fix = "fix or remove the line"
    try:
        record: object = parse_line(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        message = f"is not UTF-8 at byte {error.start} of the line"
        raise DataError(message, key=place, hint="convert the file to UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"is not JSON at column {error.colno}: {error.msg}", key=place, hint=fix) from error
    except ValueError as error:  # numbers with thousands of digits, or deep nesting
        raise DataError("contains JSON that Python cannot parse", key=place, hint=fix) from error

    if not isinstance(record, dict):
        raise DataError("is not a JSON object", key=place, hint=f'write {{"{field}": "..."}} on each line')
    return row_document(record, field, place)


def line_places(path: str, places: Iterable[str]) -> dict[str, str]:
    """Return `path:NUMBER` of the line at each place `path:byte OFFSET`, in one pass over the file."""
    found, at, number = dict[str, str](), 0, 1
    with unpacked(path) as file:
        for place in sorted(places, key=_offset):
            while at < _offset(place) and (chunk := file.read(min(_offset(place) - at, _BLOCK_BYTES))):
                number += chunk.count(b"\n")
                at += len(chunk)
            found[place] = f"{path}:{number}"
    return found


def _offset(place: str) -> int:
    """Return OFFSET of `path:byte OFFSET`; -1 for any other place."""
    found = place.rpartition(_AT)
    return int(found[2]) if found[1] else -1


def byte_place(path: str, number: int) -> str | None:
    """Return the place `path:byte OFFSET` of the line with a number from 1; None if there is no such line."""
    with unpacked(path) as file:
        at = sum(map(len, islice(file, number - 1)))
        return f"{path}{_AT}{at}" if file.read(1) else None
