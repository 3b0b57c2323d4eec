"""Documents from Parquet files: each row has the text or the token ids of one document in a column.

A row group is a block, since a document cannot be decoded without what precedes it in its row group.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from engine.config import schema
from engine.data.sources.columns import column_of, columns, damage, documents, read_lately_in
from engine.data.sources.content import HEAD, check
from engine.data.sources.files import find, reading
from engine.data.sources.library import library
from engine.data.sources.source import Block, Document, sample_blocks
from engine.errors import DataError

_BATCH_BYTES = 64 << 20  # bytes to decode at a time, about
_MOST_BYTES = 256 << 20  # that a row group may have when decoded, whatever it has in the file
_MOST_GROWTH = 1000  # of a larger row group
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_DICTIONARIES = ("RLE_DICTIONARY", "PLAIN_DICTIONARY")


@dataclass(frozen=True)
class ParquetBlock(Block):
    """A row group of a file, whose first row has the number `row` in the file."""

    path: str
    group: int
    row: int
    length: int  # bytes when decoded
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
        """Decode the columns that are needed, in batches. Raises DataError for a file that is damaged."""
        parquet = library("pyarrow.parquet", self.path)
        with reading(self.path) as file, damage(self.path):
            opened, row = parquet.ParquetFile(file), self.row
            group = opened.metadata.row_group(self.group)
            names = columns(opened.schema_arrow, self.field, self.path)
            parts = [group.column(number) for number in range(group.num_columns)]
            # A path may be that of a nested value, `messages.list.element`, or the name of a flat column, `meta.text`.
            parts = [one for one in parts if {one.path_in_schema, one.path_in_schema.partition(".")[0]} & {*names}]
            rows = max(1, group.num_rows * _BATCH_BYTES // max(_BATCH_BYTES, group.total_byte_size))
            rows = min(rows, max(1, _MOST_BYTES // max(1, 1, *(_largest_value(file, part) for part in parts))))

            # A page of zeros, a dictionary or shared prefixes make gigabytes of a few kilobytes.
            stored, decoded = sum(part.total_compressed_size for part in parts), 0
            self._check_growth(stored, max(map(_decoded_bytes, parts), default=0))
            for batch in opened.iter_batches(rows, row_groups=[self.group], columns=names):
                decoded += batch.nbytes
                self._check_growth(stored, decoded)
                yield from documents(batch, names, self.field, self.encoding, self.path, row)
                row += batch.num_rows

    def _check_growth(self, stored: int, decoded: int) -> None:
        """Raise DataError if bytes in the file become so many more when decoded that no texts or ids explain it."""
        if decoded > max(_MOST_BYTES, _MOST_GROWTH * stored):
            message = f"row group {self.group} has {stored:,} bytes in the file, but {decoded:,} or more when decoded"
            raise DataError(message, key=self.path, hint="remove repeated values, and write it again")


def _decoded_bytes(part: Any) -> int:
    """Return how many bytes a column of a row group has when decoded, at least."""
    width = _WIDTHS.get(part.physical_type, 0)
    return max(int(part.total_uncompressed_size), width * int(part.num_values))


def _largest_value(file: BinaryIO, part: Any) -> int:
    """Return an upper bound of the bytes of the largest value in a column of a row group; 0 if it is not larger when
    decoded.

    A value of a dictionary is not larger than its page. A value that shares a prefix with the one before may have all
    bytes of the column.
    """
    if part.physical_type in _WIDTHS or not {"DELTA_BYTE_ARRAY", *_DICTIONARIES} & {*part.encodings}:
        return 0
    if part.has_dictionary_page and "DELTA_BYTE_ARRAY" not in part.encodings:
        file.seek(part.dictionary_page_offset)
        # The page's header begins with its type and its decompressed size: Thrift's fields 1 and 2, varints.
        found = re.match(rb"\x15[\x80-\xff]*[\x00-\x7f]\x15([\x80-\xff]*[\x00-\x7f])", file.read(HEAD), re.DOTALL)
        if found:
            return int(sum((byte & 127) << 7 * place for place, byte in enumerate(found[1])) >> 1)
    return int(part.total_uncompressed_size)


def parquet_blocks(data: schema.Data) -> list[Block]:
    """List the row groups of files. Only the first bytes and the footer of each are read."""
    return list(_split(data))


def parquet_sample(data: schema.Data, sample: int | None, seed: int) -> tuple[list[Block], float]:
    """Choose random row groups with about `sample` documents; without `sample`, about 1 GiB at most.

    Returns them, and the fraction of the bytes that they contain.
    """
    return sample_blocks(_split(data), sample, seed)


def _split(data: schema.Data) -> list[ParquetBlock]:
    """Return the row groups of files."""
    blocks, field = list[ParquetBlock](), ""
    for path in find(data):
        parquet = library("pyarrow.parquet", path)
        with reading(path) as file, damage(path):
            check(file.read(HEAD), "parquet", path, data.path_text)
            opened, row = parquet.ParquetFile(file), 0
            field = field or column_of(opened.schema_arrow, data.field, path)
            columns(opened.schema_arrow, field, path)
            lately = read_lately_in(opened.schema_arrow, field, path)
            for number in range(opened.num_row_groups):
                group = opened.metadata.row_group(number)
                size = cast(int, group.total_byte_size)
                blocks.append(ParquetBlock(path, number, row, size, field, data.encoding, lately))
                row += group.num_rows
    return blocks
