"""Documents from Arrow files: each row has the text or the token ids of one document in a column.

Hugging Face's `save_to_disk` and its cache write streams: a message with the schema, then one per record batch. A file
in Arrow's file format is the same after 8 bytes of magic. Blocks are record batches of together about 1 MiB.

A stream ends with a marker. The format does not require it, but all libraries write it when they close a stream, and
without it a file that was cut off between two messages would read as a shorter one. So it is required here.
"""

from __future__ import annotations

import dataclasses
import os
import posixpath
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.config import schema
from engine.data.sources.columns import column_of, columns, damage, documents, read_lately_in
from engine.data.sources.content import HEAD, check
from engine.data.sources.files import check_different, find_below, kind, reading
from engine.data.sources.library import library
from engine.data.sources.source import Block, Document, sample_blocks
from engine.data.sources.urls import is_url
from engine.errors import DataError
from engine.readers import SMALL, parse_object

_BLOCK_BYTES = 1 << 20
_MAGIC = b"ARROW1\0\0"
_ENDS = b"\xff\xff\xff\xff\0\0\0\0", b"ARROW1"  # of a stream, and of a file in Arrow's file format


@dataclass(frozen=True)
class ArrowBlock(Block):
    """Record batches of a file: those at byte offsets `offsets`; the first has the number `batch`.

    Without offsets, all batches of the file.
    """

    path: str
    batch: int
    offsets: tuple[int, ...]
    length: int  # bytes in the file
    field: str
    encoding: str
    read_lately: str = ""  # see rows.py
    transform: str = dataclasses.field(default="", repr=False)

    @property
    def files(self) -> list[str]:
        return [self.path]

    @property
    def size(self) -> int:
        return self.length

    def documents(self) -> Iterator[Document]:
        """Read each record batch. Raises DataError for a file that is damaged."""
        with _opened(self.path) as source, damage(self.path):
            table, batches = _read(source, self.path)
            names = columns(table, self.field, self.path)
            if self.offsets:
                batches = self._batches(source, table)
            for number, batch in enumerate(batches, start=self.batch):
                yield from documents(batch, names, self.field, self.encoding, f"{self.path}:batch {number}", 0)

    def _batches(self, source: Any, table: Any) -> Iterator[Any]:
        """Read the pyarrow.RecordBatch at each offset of a stream with the schema `table`."""
        ipc = library("pyarrow.ipc", self.path)
        for offset in self.offsets:
            source.seek(offset)
            yield ipc.read_record_batch(ipc.read_message(source), table)


def arrow_blocks(data: schema.Data) -> list[Block]:
    """Group the record batches of files into blocks of about 1 MiB; of a local file, only messages' heads are read.

    A file behind a URL is one block, and so is one with dictionaries, which all batches need.
    """
    return list(_split(data))


def arrow_sample(data: schema.Data, sample: int | None, seed: int) -> tuple[list[Block], float]:
    """Choose random blocks with about `sample` documents; without `sample`, about 1 GiB at most.

    Returns them, and the fraction of the files' bytes that they contain.
    """
    return sample_blocks(_split(data), sample, seed)


def _split(data: schema.Data) -> list[ArrowBlock]:
    """Return the blocks of files."""
    blocks, field = list[ArrowBlock](), ""
    for path in arrow_files(data):
        with reading(path) as file:
            check(file.read(HEAD), "arrow", path, data.path_text)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - len(_MAGIC)))
            ends = file.read().endswith(_ENDS)
        with _opened(path) as source, damage(path):
            table, _ = _read(source, path)
            field = field or column_of(table, data.field, path)
            columns(table, field, path)
            lately = read_lately_in(table, field, path)
            offsets = [] if is_url(path) else _offsets(source, path)
        if not ends:
            message = "was cut off, or not closed: the marker at its end is missing"
            raise DataError(message, key=path, hint="write or download it again")
        if not offsets:
            blocks.append(ArrowBlock(path, 0, (), size, field, data.encoding, lately))
        first = 0
        for last, stop in enumerate(offsets[1:], start=1):
            if stop - offsets[first] >= _BLOCK_BYTES or last == len(offsets) - 1:
                batches, size = tuple(offsets[first:last]), stop - offsets[first]
                blocks.append(ArrowBlock(path, first, batches, size, field, data.encoding, lately))
                first = last
    return blocks


def arrow_files(data: schema.Data) -> list[str]:
    """Return the files of `data.path`. Of a folder from `save_to_disk`, those that its state.json lists.

    Others in it are results of later calls, such as cache-*.arrow of `map`. Raises DataError for a folder with several
    splits: training and test data would be mixed.
    """
    files = [file for path in data.paths for file in _files_below(path, data.pattern)]
    check_different(files)
    return files


def _files_below(top: str, pattern: str) -> list[str]:
    """Return the files of one path (see `_files`)."""
    splits = _read_json(posixpath.join(top, "dataset_dict.json")).get("splits", [])
    if splits:
        split = posixpath.join(top, "train" if "train" in splits else splits[0])
        raise DataError(f"has several splits: {', '.join(splits)}", key=top, hint=f"set data.path={shlex.quote(split)}")
    found = find_below(top, pattern)
    for folder in {posixpath.dirname(path) for path in found} if kind(top) == "folder" else ():
        listed = _read_json(posixpath.join(folder, "state.json")).get("_data_files")
        if listed is not None:
            names = {one["filename"] for one in listed}
            found = [one for one in found if posixpath.dirname(one) != folder or posixpath.basename(one) in names]
    return found


def _read_json(path: str) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if there is no file."""
    if kind(path) != "file":
        return {}
    with reading(path) as file:
        return parse_object(file.read(SMALL), path, hint="write or download the data set again")


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """Open the stream in a file as a pyarrow.NativeFile; a local file is mapped into memory, so nothing is copied."""
    pyarrow = library("pyarrow", path)
    with (
        reading(path) as file,
        pyarrow.PythonFile(file, mode="r") if is_url(path) else pyarrow.memory_map(os.fsencode(path)) as source,
    ):
        source.seek(len(_MAGIC) if source.read(len(_MAGIC)) == _MAGIC else 0)
        yield source


def _read(source: Any, path: str) -> tuple[Any, Iterator[Any]]:
    """Return the schema, and an iterator of the record batches, of what `_opened` yields.

    Files in Arrow's file format are read as the stream that they contain. Those of Polars have their schema only in the
    footer.
    """
    ipc, begin = library("pyarrow.ipc", path), source.tell()
    try:
        stream = ipc.open_stream(source)
        return stream.schema, iter(stream)
    except (library("pyarrow", path).ArrowInvalid, OSError):
        if begin == 0:
            raise
        file = ipc.open_file(source)
        source.seek(0, os.SEEK_END)  # where `_offsets` finds no record batch, so that the file is one block
        return file.schema, (file.get_batch(number) for number in range(file.num_record_batches))


def _offsets(source: Any, path: str) -> list[int]:
    """Return where each record batch of a stream begins, and where the last ends.

    Empty without record batches, or with dictionaries. `source` is where the first message after the schema begins.
    """
    ipc, offsets = library("pyarrow.ipc", path), [source.tell()]
    while True:
        try:
            message = ipc.read_message(source)
        except EOFError:
            return offsets if len(offsets) > 1 else []
        if message.type != "record batch":
            return []
        offsets.append(source.tell())
