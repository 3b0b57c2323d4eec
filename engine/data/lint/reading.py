"""Lists the blocks of a source, and reads their documents beyond files that are damaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from engine.config import schema
from engine.data.lint.findings import Example, Tally
from engine.data.sources.formats import FORMATS
from engine.data.sources.source import Block, Document, with_transform
from engine.data.token_file import TokenFile
from engine.errors import DataError

_BLOCK_BYTES = 16 << 20  # of a token file
open_tokens = cache(TokenFile.open)  # which reads the whole index


@dataclass(frozen=True)
class TokenBlock(Block):
    """Documents first .. last - 1 of a token file."""

    prefix: Path
    first: int
    last: int

    @property
    def files(self) -> list[str]:
        return [f"{self.prefix}.idx", f"{self.prefix}.bin"]

    @property
    def size(self) -> int:
        return int(open_tokens(self.prefix).lengths(self.first, self.last).sum())

    def documents(self) -> Iterator[Document]:
        """Read each document. Raises DataError if the token file is damaged."""
        opened = open_tokens(self.prefix)
        for number in range(self.first, self.last):
            yield Document(f"{self.prefix}:document {number}", None, opened.read(number, 0, opened.tokens))


def blocks_of(data: schema.Data, tally: Tally) -> list[Block]:
    """List the blocks of a source. A file among several that cannot be listed is counted in `tally`.

    Raises DataError for a source without anything to read.
    """
    if data.format == "tokens":
        opened = open_tokens(Path(data.paths[0]))
        parts = max(1, opened.tokens * opened.dtype.itemsize // _BLOCK_BYTES)
        bounds = [len(opened) * number // parts for number in range(parts + 1)]
        return [TokenBlock(opened.prefix, first, last) for first, last in pairwise(bounds) if last > first]
    form = FORMATS[data.format]
    try:
        return with_transform((form.unsized or form.blocks)(data), data)
    except DataError as error:
        files = form.files(data)
        if len(files) < 2 or error.problems[0].key not in files:
            raise
    blocks = list[Block]()
    for path in files:
        try:
            blocks += with_transform(form.blocks(data.model_copy(update={"path": path})), data)
        except DataError as error:
            tally.add("L01", Example(0, path, error.problems[0].message), error)
            tally.refused += 1
    return blocks


def documents_of(block: Block) -> Iterator[tuple[Document, bool]]:
    """Read the documents of a block, and whether each has been read.

    A file that cannot be read any further makes a last one that has not; the other files of a folder are read.
    """
    try:
        for document in block.documents():
            yield document, True
    except DataError as error:
        yield Document(error.problems[0].key or block.files[0], None, problem=error), False
        rest = block.after(error.problems[0].key or "")
        if rest is not None:
            yield from documents_of(rest)
