"""Finds documents with the same content, of any number of documents, exactly and in bounded memory.

Each process appends a record for each document, 24 bytes, to a separate file. Then the records are sorted by hash, as
many at a time as memory allows: beyond 4M documents, each pass over the files takes those with the next range of
hashes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

RECORD = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", "<u8")])  # 128 bits of hash, a number of the document
_SORTED = 1 << 22  # records that are sorted at a time, with about 80 bytes of memory each
_CHUNK = 1 << 20  # records that are read at a time


class Copies(NamedTuple):
    """The number of documents that are equal to one before them, and the first of them: (copy, original)."""

    number: int
    examples: list[tuple[int, int]]


def record(content: bytes, document: int) -> bytes:
    """Return the record of a document, `RECORD`: its content's hash, and its number, below 2^64."""
    return blake2b(content, digest_size=16).digest() + document.to_bytes(8, "little")


def write_records(folder: Path, records: list[bytes]) -> None:
    """Append records to the file of this process in `folder`. Raises OSError, for example if the disk is full."""
    with (folder / f"{os.getpid()}.records").open("ab") as file:
        file.write(b"".join(records))


def find_copies(folder: Path, examples: int) -> Copies:
    """Find the copies among all records that were written to `folder`, with at most so many examples.

    Of equal documents the one with the lowest number is the original.
    """
    files = list(folder.glob("*.records"))
    total = sum(path.stat().st_size for path in files) // RECORD.itemsize
    bits = max(0, -(-total // _SORTED) - 1).bit_length()  # 2^bits passes
    count, first = 0, list[tuple[int, int]]()
    for number in range(1 << bits):
        found = _copies(_selected(files, number, bits))
        count += len(found)
        least = found[np.argsort(found[:, 0])[:examples]].tolist()
        first = sorted([*first, *((copy, original) for copy, original in least)])[:examples]
    return Copies(count, first)


def _selected(files: list[Path], number: int, bits: int) -> NDArray[Any]:
    """Read the records whose hash begins with the `bits` bits of `number`: RECORD [n]."""
    return np.concatenate([np.empty(0, RECORD), *_chunks(files, number, bits)])


def _chunks(files: list[Path], number: int, bits: int) -> Iterator[NDArray[Any]]:
    for path in files:
        with path.open("rb") as file:
            while content := file.read(_CHUNK * RECORD.itemsize):
                records = np.frombuffer(content, RECORD)
                yield records[records["high"] >> np.uint64(64 - bits) == number] if bits else records


def _copies(records: NDArray[Any]) -> NDArray[np.uint64]:
    """Return the number of each document that is a copy, and that of its original: [n, 2]."""
    order = np.lexsort((records["document"], records["low"], records["high"]))
    high, low, documents = (records[name][order] for name in ("high", "low", "document"))
    same = np.zeros(len(records), dtype=np.bool_)
    same[1:] = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(records))))  # where each run of equal ones begins
    return np.stack([documents[same], documents[first[same]]], axis=1)
