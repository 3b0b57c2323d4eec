"""Documents of blocks as a test has made them, and Blocks that has them in memory: what a runtime must agree with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from engine.data.blocks.blocks import BlockId, Range, Slice, changed, is_of
from engine.data.parts import LeftOut
from engine.errors import DataError
from engine.units import Ints
from tests.data.memory import MemoryLengths


@dataclass(frozen=True)
class Made:
    """A document. `text` is what its tokens were made of, None if the source has ids."""

    ids: list[int]
    mask: list[bool]
    text: bytes | None = None

    @property
    def hash(self) -> int:
        """The hash that its block has: of the text or the ids, and of the mask if a token does not count."""
        content = np.array(self.ids, dtype="<i8").tobytes() if self.text is None else self.text
        if not all(self.mask):
            content += np.packbits(self.mask, bitorder="little").tobytes()
        return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class MadeBlock:
    """A block: its documents, the files that they come from, what is left out, and the error of one that is broken."""

    documents: list[Made]
    files: list[str]
    left_out: LeftOut = field(default_factory=lambda: LeftOut([], []))
    error: DataError | None = None


class BlockLengths(MemoryLengths):
    """The lengths of a block that was made."""

    def __init__(self, block: MadeBlock) -> None:
        inputs: Ints = np.array([len(one.ids) - 1 for one in block.documents], dtype=np.int64)
        hashes: NDArray[np.uint64] = np.array([one.hash for one in block.documents], dtype=np.uint64)
        super().__init__(inputs, hashes, [~np.array(one.mask) for one in block.documents])
        self.left_out = block.left_out


class MemoryBlocks:
    """Blocks without files or processes."""

    def __init__(self, made: Mapping[BlockId, MadeBlock]) -> None:
        self._made = made

    def ask(self, wanted: Iterable[BlockId]) -> None:
        """Everything is there. Blocks that nobody has made are a mistake of the caller."""
        assert all(block in self._made for block in wanted)

    def lengths(self, block: BlockId) -> BlockLengths:
        made = self._made[block]
        if made.error is not None:
            raise made.error
        return BlockLengths(made)

    def slices(self, wanted: Sequence[Range]) -> list[Slice]:
        return [self._slice(one) for one in wanted]

    def _slice(self, wanted: Range) -> Slice:
        block = BlockId(wanted.source, wanted.block)
        if block not in self._made:
            raise changed(block, wanted.document, [wanted.source])
        if not is_of(self.lengths(block), wanted.document, wanted.content):
            raise changed(block, wanted.document, self._made[block].files)
        found = self._made[block].documents[wanted.document]
        part = slice(wanted.start, wanted.stop)
        return Slice(np.array(found.ids[part], dtype=np.int64), np.array(found.mask[part], dtype=np.bool_))

    def keep(self, wanted: Iterable[BlockId]) -> None:
        self.ask(wanted)

    def close(self) -> None:
        """There is nothing to end."""
