"""The random order of the documents of an epoch: a pure function of a key, without a table of all documents.

```
 documents   | block 0 | block 1 | block 2 | ...            consecutive documents, about 1 MiB
 blocks      | 7 | 2 | 9 | 0 |  | 4 | ...                   in random order
 windows     | about 16 MiB     | about 16 MiB ...          the documents of a window are in random order
```
So neighbours in the order are near each other in the source, and only the blocks of a window must have been packed to
know the order of its documents. A window begins where the last one ended, so a place in the order is the number of
blocks before the window and the number of documents in it.

Orders have numbers, and a run keeps its own (`Cursor`). They differ in the blocks of an epoch's windows, here with
blocks of 1 MiB:

| order | of new runs | blocks of windows | to use n MiB of a new source, it packs |
|---|---|---|---|
| 1 | on few documents, which a start packs anyway | 16, 16, 16, ... | at least 16 MiB |
| 2 | on others | 1, 1, 2, 4, 8, 16, 16, ... | at most 2 n + 1 MiB |

Letters: N documents of a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.data.blocks.blocks import BlockId
from engine.data.corpus import Corpus
from engine.data.permute import Permutation
from engine.data.quarantine import Unusable
from engine.errors import DataError
from engine.units import Ints

ORDER = 2  # the last one; 1 is that of checkpoints without a number
OF_NEW_RUN = 0  # in place of the number that `order_of_new` gives a run
FEW_BYTES = 64 << 20  # of sources that are read completely before training
WINDOW_BYTES = 16 << 20
FEWEST, MOST = 4, 64  # blocks of a window
_PERMUTED = 4096  # most blocks that are permuted at once


class Documents(NamedTuple):
    """Some documents with at least one input, in random order."""

    block: Ints  # [N] number of the block in the corpus
    document: Ints  # [N] number in the block
    inputs: Ints  # [N]
    hash: NDArray[np.uint64]  # [N] of the content

    def chosen(self, documents: Ints | slice) -> Documents:
        """Return some of the documents, in this order."""
        return Documents(self.block[documents], self.document[documents], self.inputs[documents], self.hash[documents])

    @classmethod
    def joined(cls, several: Sequence[Documents]) -> Documents:
        """Return all documents of several, of at least one, one after the other."""
        return cls(*map(np.concatenate, zip(*several, strict=True)))


class Window(NamedTuple):
    """The documents of some blocks."""

    trained: Documents
    validated: Documents
    blocks: int  # number of blocks
    unusable: list[Unusable]  # documents that were left out
    dropped: dict[BlockId, int]  # documents, and pieces of documents, that a transform left out; of blocks with any


def are_few(corpora: Iterable[Corpus]) -> bool:
    """Return whether there are so few documents that all are read before training."""
    total = 0
    for corpus in corpora:
        for block in range(corpus.blocks):
            total += corpus.size(block)
            if total > FEW_BYTES:
                return False
    return True


def order_of_new(corpora: Iterable[Corpus]) -> int:
    """Return the number of the order of a new run."""
    return 1 if are_few(corpora) else ORDER


def window_blocks(corpus: Corpus, key: str, order: int, place: int) -> Iterator[list[int]]:
    """Yield the blocks of the window that begins with block number `place` of an epoch, and those of each later one.

    `order` is its number, and `key` a text. A window has as many blocks as have together 16 MiB, but at least 4 and at
    most 64; in order 2 also at most as many as there are before it. Only the sizes of blocks are looked up. Raises
    DataError if a source has fewer than `place` blocks.
    """
    if place > corpus.blocks:
        message = f"has {corpus.blocks:,} blocks of documents; the checkpoint is at block {place:,}"
        raise DataError(
            message, key=corpus.place, hint="restore the documents, or start a new run with another run.out"
        )
    found, size = list[int](), 0
    for block in chain.from_iterable(_permuted(corpus.blocks, key, place)):
        found.append(block)
        size += corpus.size(block)
        is_full = len(found) == MOST or (size >= WINDOW_BYTES and len(found) >= FEWEST)
        if is_full or (order > 1 and len(found) >= place):
            yield found
            place, found, size = place + len(found), [], 0
    if found:
        yield found


def _permuted(blocks: int, key: str, place: int) -> Iterator[list[int]]:
    """Yield the blocks from number `place` of the order `key`, in parts: many at once take little longer than one."""
    order, count = Permutation(blocks, key), MOST
    while place < blocks:
        yield order(np.arange(place, min(place + count, blocks))).tolist()
        place, count = place + count, min(2 * count, _PERMUTED)


def window(corpus: Corpus, key: str, order: int, place: int) -> Window:
    """Return the documents of the first window of `window_blocks`; of none, if there is no block at `place`."""
    none = np.empty(0, dtype=np.int64)
    block, document, inputs, hashes = [none], [none], [none], [none.astype(np.uint64)]
    unusable, dropped = list[Unusable](), dict[BlockId, int]()
    chosen = next(window_blocks(corpus, key, order, place), [])
    for number in chosen:
        lengths = corpus.lengths(number)
        inputs.append(lengths.inputs())
        hashes.append(lengths.hash())
        if lengths.left_out is not None:
            unusable += (Unusable(corpus.name, number, *one) for one in lengths.left_out.broken)
            if lengths.left_out.dropped:
                dropped[BlockId(corpus.name, number)] = lengths.left_out.dropped
        block.append(np.full(len(inputs[-1]), number))
        document.append(np.arange(len(inputs[-1])))
    join = np.concatenate
    found = Documents(join(block), join(document), join(inputs), join(hashes))
    shuffled = Permutation(len(found.inputs), f"{key}, window {place}")(np.arange(len(found.inputs)))
    shuffled = shuffled[found.inputs[shuffled] > 0]
    validates = found.hash[shuffled] / 2.0**64 < corpus.share
    trained, validated = found.chosen(shuffled[~validates]), found.chosen(shuffled[validates])
    return Window(trained, validated, len(chosen), unusable, dropped)
