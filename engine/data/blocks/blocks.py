"""The interface through which planning and ranks read the blocks of texts of a run, whichever process packs them.

```
 order of need   ask([web:7, code:2, ...])      they are packed ahead, in this order
 planner         lengths(web:7)                 inputs, hashes and masked runs of its documents; no tokens
 rank            slices([web:7:12 [0, 4097), ...])   their tokens, and which of them count in the loss
```
The implementation decides which process packs a block. The content is a pure function of the block's files, so it does
not matter which one did, or how often.

Letters: D documents of a block, n tokens of a slice, R runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.data.parts import LeftOut
from engine.errors import DataError
from engine.units import Ints


class BlockId(NamedTuple):
    """A block of a run."""

    source: str  # name of the source
    block: int  # number of the block in the source


class Range(NamedTuple):
    """Tokens start .. stop - 1 of a document."""

    source: str
    block: int
    document: int  # number in the block
    start: int
    stop: int
    content: int  # hash of the document when it was chosen


class Slice(NamedTuple):
    """The tokens of a range; fewer than it has if the document is shorter."""

    tokens: Ints  # [n]
    counted: NDArray[np.bool_] | None  # [n] which of them count as labels; None: all


class Lengths(Protocol):
    """What planning needs to know of the documents of a block. It has no tokens."""

    @property
    def left_out(self) -> LeftOut | None:
        """The documents that were left out; None for a token file that was packed before the run."""
        ...

    def __len__(self) -> int:
        """Return the number of documents, D."""
        ...

    def inputs(self) -> Ints:
        """Return how many inputs each document has, int64 [D]. Those without an input have fewer than two tokens."""
        ...

    def hash(self, first: int = 0, last: int | None = None) -> NDArray[np.uint64]:
        """Return a hash of the content with the mask of documents first .. last - 1, uint64; of all [D].

        It decides which documents are for validation, so that no content is on both sides. In a file of another tool,
        it is a hash of the document's number.
        """
        ...

    def runs(self) -> Ints:
        """Return the runs of tokens that do not count as labels: document, start and stop; int64 [R, 3].

        They are in order, and those of a document do not touch each other.
        """
        ...


class Blocks(Protocol):
    """The blocks of the texts of a run. A process has one such object; `slices` may be called in any thread."""

    def ask(self, wanted: Iterable[BlockId]) -> None:
        """Pack these blocks in advance, in this order, instead of those of the last call. Returns immediately.

        It only saves time: other blocks can be read, too.
        """
        ...

    def lengths(self, block: BlockId) -> Lengths:
        """Return the lengths of a block, and wait until it is packed.

        Raises DataError for a document that cannot be used, StorageError if the block cannot be packed or read.
        """
        ...

    def slices(self, wanted: Sequence[Range]) -> list[Slice]:
        """Return the tokens of ranges. Raises errors as `lengths`, and DataError if a document is no longer the same.

        The planning process and the ranks open a block at different times. A file may have changed in between, so that
        the same number is another document.
        """
        ...

    def keep(self, wanted: Iterable[BlockId]) -> None:
        """Never evict these blocks: they are read again in every validation."""
        ...

    def close(self) -> None:
        """End what packs ahead. Blocks can still be read."""
        ...


def is_of(lengths: Lengths, document: int, content: int) -> bool:
    """Return whether a block has a document with this number and hash."""
    return document < len(lengths) and lengths.hash(document, document + 1)[0] == content


def changed(block: BlockId, document: int, files: Sequence[str]) -> DataError:
    """Create the DataError for a document that is another one than was chosen. `files` are those of its block."""
    place = files[0] if len(files) == 1 else f"{files[0]} .. {files[-1]}"
    message = f"has changed since document {block.source}:{block.block}:{document} was chosen for a step"
    return DataError(message, key=place, hint="run the same command again; do not change documents during a run")


def masked_within(lengths: Lengths, documents: Ints, start: Ints, stop: Ints) -> Ints:
    """Return how many of the tokens start .. stop - 1 [n] of each of some documents [n] of a block are masked."""
    runs = lengths.runs()
    if not len(runs):
        return np.zeros_like(start)
    tokens = lengths.inputs() + 1
    begin = np.cumsum(tokens) - tokens  # of each document in the block
    first, last = begin[runs[:, 0]] + runs[:, 1], begin[runs[:, 0]] + runs[:, 2]
    before = np.append(0, np.cumsum(last - first))  # masked tokens before each run
    ends = np.append(0, last)

    def masked_before(token: Ints) -> Ints:
        """Return how many of the block's tokens before each token are masked."""
        begun = np.searchsorted(first, token)
        found: Ints = before[begun] - np.maximum(ends[begun] - token, 0)
        return found

    return masked_before(begin[documents] + stop) - masked_before(begin[documents] + start)
