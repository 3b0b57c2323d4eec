"""Documents from Parquet files: each row has the text or the token ids of one document in a column.

A row group is a block, since a document cannot be decoded without what precedes it in its row group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from engine.config import schema
from engine.data.sources.columns import column_of, columns, damage, documents
from engine.data.sources.content import HEAD, check
from engine.data.sources.files import find, reading
from engine.data.sources.library import library
from engine.data.sources.source import Block, Document, sample_blocks

_BATCH_BYTES = 64 << 20  # bytes to decode at a time, about


@dataclass(frozen=True)
class ParquetBlock(Block):
    """A row group of a file, whose first row has the number `row` in the file."""

    path: str
    group: int
    row: int
    length: int  # bytes when decoded
    field: str
    encoding: str

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
            rows = max(1, group.num_rows * _BATCH_BYTES // max(_BATCH_BYTES, group.total_byte_size))
            names = columns(opened.schema_arrow, self.field, self.path)
            for batch in opened.iter_batches(rows, row_groups=[self.group], columns=names):
                yield from documents(batch, names, self.field, self.encoding, self.path, row)
                row += batch.num_rows


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
            for number in range(opened.num_row_groups):
                group = opened.metadata.row_group(number)
                size = cast(int, group.total_byte_size)
                blocks.append(ParquetBlock(path, number, row, size, field, data.encoding))
                row += group.num_rows
    return blocks
