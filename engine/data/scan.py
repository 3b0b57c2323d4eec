"""Measures the documents of a source in several processes; of a large source, a sample of them.

An index (index.py) reads every document, in order, for training. Here only lengths are wanted, soon, and of any part.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.random import Generator, Philox

from engine.config import schema
from engine.config.units import counted
from engine.data.files import reading
from engine.data.folder import FolderSource
from engine.data.jsonl import file_of, text_of
from engine.errors import DataError
from engine.planner.plan import Ints
from engine.safe_path import safe_path

Progress = Callable[[float], None]  # called with the share of the work that is done

# What is read unless a sample is asked for: of more files, or of a larger JSONL file, so many. A hundred of 100,000
# documents are longer than the 99.9th percentile; 1 GiB takes seconds.
_FILES = 100_000
_BYTES = 1 << 30
_PART_FILES = 64
_PART_BYTES = 16 << 20
_BLOCK = 64 << 10  # bytes of a JSONL file that are taken or left together
_PILOT = 256  # blocks that tell how many documents a block has


@dataclass(frozen=True, eq=False)
class Documents:
    """Lengths of documents that are not empty, in inputs, [N]; `share` is the part of the source that they are."""

    lengths: Ints
    empty: int = 0
    share: float = 1.0


class Part(Protocol):
    """A part of a source that one process reads."""

    def sizes(self) -> list[int]:
        """Return the bytes of text of each document, 0 for an empty one. Raises DataError as a source does."""
        ...


@dataclass(frozen=True)
class FolderPart:
    """Some of a folder's files: all that this source names."""

    source: FolderSource

    def sizes(self) -> list[int]:
        """Return the bytes of text of each file."""
        return [len(self.source.read(document)) for document in range(len(self.source.names))]


@dataclass(frozen=True)
class JsonlPart:
    """The lines of a JSONL file that begin in one of some ranges of bytes."""

    path: Path
    field: str
    ranges: Sequence[tuple[int, int]]

    def sizes(self) -> list[int]:
        """Return the bytes of text of each line."""
        with reading(self.path) as file:
            return [self._size(at, line) for start, stop in self.ranges for at, line in lines(file, start, stop)]

    def _size(self, at: int, line: bytes) -> int:
        if line.isspace():
            return 0
        try:
            return len(text_of(line.rstrip(b"\r\n"), self.field, str(self.path)))
        except DataError:
            place = f"{self.path}:{_line_number(self.path, at)}"  # counted only now: it reads all that is before
            return len(text_of(line.rstrip(b"\r\n"), self.field, place))


def scan(data: schema.Data, sample: int | None, seed: int, progress: Progress = lambda share: None) -> Documents:
    """Return the lengths of a source's documents, or of about `sample` of them that `seed` chooses.

    Without `sample` a folder of up to 100,000 files and a JSONL file of up to 1 GiB are read whole, and of larger ones
    so much. Lines of a JSONL file are chosen by blocks of 64 KiB: each line with the same probability.
    Raises DataError when a document is refused, and when all are empty.
    """
    parts, share = (_folder_parts if data.format == "folder" else _jsonl_parts)(data, sample, seed)
    sizes: list[int] = []
    for done, found in enumerate(_read(parts), start=1):
        sizes += found
        progress(done / len(parts))
    inputs = np.array(sizes, dtype=np.int64) + 1  # BOS is one, as in index.py
    if not (inputs > 1).any():
        message = f"no text in {counted(len(sizes), 'document')}" if sizes else "has no line with a document"
        raise DataError(message, key=data.path, hint="set data.path to documents with text")
    return Documents(inputs[inputs > 1], int((inputs == 1).sum()), share)


def lines(file: BinaryIO, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and the bytes of each line that begins in start..stop of a file."""
    at = start
    if start > 0:  # from the byte before, so that a line that begins at `start` is ours
        file.seek(start - 1)
        at += len(file.readline(stop - start + 1)) - 1
    file.seek(at)
    while at < stop and (line := file.readline()):
        yield at, line
        at += len(line)


def _folder_parts(data: schema.Data, sample: int | None, seed: int) -> tuple[list[Part], float]:
    source = FolderSource(data)
    files = len(source.names)
    count = min(files, sample or _FILES)
    chosen = _choose(files, count, seed)
    parts: list[Part] = []
    for first in range(0, count, _PART_FILES):
        some = copy(source)
        some.names = tuple(source.names[document] for document in chosen[first : first + _PART_FILES].tolist())
        parts.append(FolderPart(some))
    return parts, count / files


def _jsonl_parts(data: schema.Data, sample: int | None, seed: int) -> tuple[list[Part], float]:
    path = file_of(data)
    with reading(path) as file:
        size = file.seek(0, os.SEEK_END)
    if size == 0 or (sample is None and size <= _BYTES):
        return [JsonlPart(path, data.field, [some]) for some in _ranges(size, _PART_BYTES)], 1.0
    blocks = _ranges(size, _BLOCK)
    asked = _BYTES // _BLOCK if sample is None else _blocks_of(sample, path, data.field, blocks, seed)
    count = min(len(blocks), asked)
    chosen = [blocks[block] for block in _choose(len(blocks), count, seed)]
    together = _PART_BYTES // _BLOCK
    parts: list[Part] = [
        JsonlPart(path, data.field, chosen[first : first + together]) for first in range(0, count, together)
    ]
    return parts, sum(stop - start for start, stop in chosen) / size


def _blocks_of(sample: int, path: Path, field: str, blocks: list[tuple[int, int]], seed: int) -> int:
    """Return how many blocks hold about `sample` documents, judged by some of them."""
    chosen = _choose(len(blocks), min(_PILOT, len(blocks)), seed)
    found = len(JsonlPart(path, field, [blocks[block] for block in chosen]).sizes())
    return -int(-sample * len(chosen) // max(1, found))


def _ranges(size: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(size, start + step)) for start in range(0, size, step)]


def _choose(among: int, count: int, seed: int) -> Ints:
    """Return `count` of the numbers 0..among-1, ascending."""
    return np.sort(Generator(Philox(key=seed)).choice(among, count, replace=False)).astype(np.int64)


def _read(parts: Sequence[Part]) -> Iterator[list[int]]:
    """Yield what each part holds, in order. One part alone is read here."""
    workers = min(len(parts), os.cpu_count() or 1)
    if workers < 2:
        yield from map(_sizes, parts)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads of numpy
    os.environ.update(safe_path())  # there is no other way to give a worker its environment
    try:
        with ProcessPoolExecutor(workers, context, initializer=_leave_interrupts) as pool:
            yield from pool.map(_sizes, parts)
    except BrokenProcessPool as error:
        message = "a process that read documents was killed, perhaps for want of memory"
        raise DataError(message, hint="--sample reads fewer; or close other programs") from error


def _sizes(part: Part) -> list[int]:
    return part.sizes()


def _leave_interrupts() -> None:
    """Leave Ctrl-C to the parent, which then ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _line_number(path: Path, offset: int) -> int:
    """Return the number, from 1, of the line that begins at an offset."""
    number, left = 1, offset
    with reading(path) as file:
        while left > 0 and (chunk := file.read(min(left, _PART_BYTES))):
            number += chunk.count(b"\n")
            left -= len(chunk)
    return number
