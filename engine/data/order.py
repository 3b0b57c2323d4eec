"""The random order of the documents of an epoch: a pure function of a key, without a table of all documents.

```
 documents   | block 0 | block 1 | block 2 | ...            consecutive documents, about 1 MiB
 blocks      | 7 | 2 | 9 | 0 |  | 4 | ...                   in random order
 windows     | about 16 MiB     | about 16 MiB ...          the documents of a window are in random order
```
So neighbours in the order are near each other in the source, and only the blocks of a window must have been packed to
know the order of its documents. A window begins where the last one ended, so a place in the order is the number of
blocks before the window and the number of documents in it.

Letters: N documents of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.data.corpus import Corpus
from engine.data.permute import Permutation
from engine.data.quarantine import Unusable
from engine.errors import DataError
from engine.units import Ints

WINDOW_BYTES = 16 << 20
FEWEST, MOST = 4, 64  # blocks of a window


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


def window_blocks(corpus: Corpus, key: str, place: int) -> list[int]:
    """Return the blocks of the window that begins with block number `place` of the order `key`; none after the last.

    A window has as many blocks as have together 16 MiB, but at least 4 and at most 64. Only their sizes are looked up.
    """
    if place > corpus.blocks:
        message = f"has {corpus.blocks:,} blocks of documents; the checkpoint is at block {place:,}"
        raise DataError(
            message, key=corpus.place, hint="restore the documents, or start a new run with another run.out"
        )
    last, found, size = min(place + MOST, corpus.blocks), list[int](), 0
    for block in Permutation(corpus.blocks, key)(np.arange(place, last)).tolist():
        if size >= WINDOW_BYTES and len(found) >= FEWEST:
            break
        found.append(block)
        size += corpus.size(block)
    return found


def window(corpus: Corpus, key: str, place: int) -> Window:
    """Return the documents of the window that begins with block number `place` of the order `key`."""
    none = np.empty(0, dtype=np.int64)
    block, document, inputs, hashes = [none], [none], [none], [none.astype(np.uint64)]
    unusable = list[Unusable]()
    chosen = window_blocks(corpus, key, place)
    for number in chosen:
        lengths = corpus.lengths(number)
        inputs.append(lengths.inputs())
        hashes.append(lengths.hash())
        if lengths.left_out is not None:
            unusable += (Unusable(corpus.name, number, *one) for one in lengths.left_out.broken)
        block.append(np.full(len(inputs[-1]), number))
        document.append(np.arange(len(inputs[-1])))
    join = np.concatenate
    found = Documents(join(block), join(document), join(inputs), join(hashes))
    order = Permutation(len(found.inputs), f"{key}, window {place}")(np.arange(len(found.inputs)))
    order = order[found.inputs[order] > 0]
    validates = found.hash[order] / 2.0**64 < corpus.share
    trained, validated = found.chosen(order[~validates]), found.chosen(order[validates])
    return Window(trained, validated, len(chosen), unusable)
