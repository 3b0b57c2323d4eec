"""The documents of a block in a token file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.data.blocks.blocks import BlockId, Range, Slice, changed, is_of
from engine.data.parts import LeftOut
from engine.data.token_file import Numbers, TokenFile
from engine.errors import DataError
from engine.units import Ints


@dataclass(frozen=True, eq=False)
class Packed:
    """The Lengths of a block, and its tokens: documents first .. last - 1 of a token file."""

    tokens: TokenFile
    hashes: Numbers | None  # of the contents of all documents of the file, 8 bytes each; None for one of another tool
    first: int
    last: int
    left_out: LeftOut | None = None  # None for a file of another tool, and one of `bytescale data pack`

    def __post_init__(self) -> None:
        """Raise DataError if the mask of a block of texts is missing."""
        if self.left_out is not None:
            self.tokens.check_mask(self.left_out.masked)

    def __len__(self) -> int:
        return self.last - self.first

    def inputs(self) -> Ints:
        found: Ints = np.maximum(self.tokens.lengths(self.first, self.last) - 1, 0)
        return found

    def hash(self, first: int = 0, last: int | None = None) -> NDArray[np.uint64]:
        begin, count = self.first + first, (len(self) if last is None else last) - first
        if self.hashes is not None:
            found = self.hashes.read("<u8", count, 8 * begin)
            if len(found) < count:
                raise DataError("was cut off", key=str(self.hashes.path), hint="remove it; it is written again")
            return found
        generator = np.random.Philox(key=0).advance(begin // 4)  # draws four numbers at a time
        return generator.random_raw(count + 4)[begin % 4 :][:count]

    def runs(self) -> Ints:
        counted = self.tokens.counted_of(self.first, self.last)
        if counted is None:
            return np.empty((0, 3), dtype=np.int64)
        masked, ends = ~counted, np.cumsum(self.tokens.lengths(self.first, self.last))
        # A token begins a run if the one before it is not masked, or is of another document.
        begins, stops = masked.copy(), masked.copy()
        begins[1:] &= counted[:-1]
        stops[:-1] &= counted[1:]
        edges = ends[(ends > 0) & (ends < len(masked))]
        begins[edges], stops[edges - 1] = masked[edges], masked[edges - 1]
        first, last = np.flatnonzero(begins), np.flatnonzero(stops)
        document = np.searchsorted(ends, first, side="right")
        before = np.append(0, ends)[document]
        return np.stack([document, first - before, last + 1 - before], axis=1)

    def read(self, wanted: Range, files: list[str]) -> Slice:
        """Return the tokens of a range of this block. `files` are those of the block, for messages.

        Raises DataError if the document is no longer the one that was chosen.
        """
        if not is_of(self, wanted.document, wanted.content):
            raise changed(BlockId(wanted.source, wanted.block), wanted.document, files)
        place = self.first + wanted.document, wanted.start, wanted.stop
        return Slice(self.tokens.read(*place), self.tokens.counted(*place))
