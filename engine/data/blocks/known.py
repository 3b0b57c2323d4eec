"""Lengths of blocks in memory: planning needs those of a block again for each step that uses one of its documents.

Letters: D documents of a block, M masked runs of a block.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.data.blocks.blocks import BlockId, Lengths
from engine.data.parts import LeftOut
from engine.units import Ints

_MOST = 1 << 22  # documents and masked runs that are kept, 12 bytes each


@dataclass(frozen=True, eq=False)
class KnownLengths:
    """The Lengths of a block, as arrays in memory."""

    left_out: LeftOut | None
    counts: NDArray[np.int32]  # [D] inputs of each document
    hashes: NDArray[np.uint64]  # [D]
    masked: NDArray[np.int32]  # [M, 3] the masked runs

    @classmethod
    def of(cls, lengths: Lengths) -> KnownLengths:
        """Read all lengths of a block."""
        counts, runs = lengths.inputs().astype(np.int32), lengths.runs().astype(np.int32)
        return cls(lengths.left_out, counts, lengths.hash(), runs)

    def __len__(self) -> int:
        return len(self.counts)

    def inputs(self) -> Ints:
        return self.counts.astype(np.int64)

    def hash(self, first: int = 0, last: int | None = None) -> NDArray[np.uint64]:
        return self.hashes[first:last]

    def runs(self) -> Ints:
        return self.masked.astype(np.int64)


class LengthsCache:
    """The lengths of the blocks that were used last. It may be used in any thread."""

    def __init__(self) -> None:
        self._found, self._size = OrderedDict[BlockId, KnownLengths](), 0
        self._changing = threading.Lock()

    def __contains__(self, block: BlockId) -> bool:
        return block in self._found

    def get(self, block: BlockId) -> KnownLengths | None:
        """Return the lengths of a block; None if they are not here."""
        with self._changing:
            if (found := self._found.get(block)) is not None:
                self._found.move_to_end(block)
            return found

    def add(self, block: BlockId, lengths: KnownLengths) -> None:
        """Keep the lengths of a block, instead of those of the blocks that were not used for the longest time."""
        with self._changing:
            if (before := self._found.pop(block, None)) is not None:
                self._size -= len(before.counts) + len(before.masked)
            self._found[block] = lengths
            self._size += len(lengths.counts) + len(lengths.masked)
            while self._size > _MOST and len(self._found) > 1:
                _, oldest = self._found.popitem(last=False)
                self._size -= len(oldest.counts) + len(oldest.masked)
