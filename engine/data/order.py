"""The random order of the documents of an epoch: a pure function of a key, without a table of all documents.

```
 documents   | block 0 | block 1 | block 2 | ...            256 consecutive documents each
 blocks      | 7 | 2 | 9 | 0 |  | 4 | ...                   in random order
 windows     | 64 blocks        | 64 blocks ...             the documents of a window are in random order
```
So neighbours in the order are near each other in the file, and a process reads the index of one window at a time. At
most 16,384 documents are one window, and in completely random order. Those after the last full block are in the last
window.
"""

from __future__ import annotations

import numpy as np

from engine.data.permute import Permutation
from engine.units import Ints

BLOCK = 256  # documents
WINDOW = 64 * BLOCK  # documents


def windows(count: int) -> int:
    """Return the number of windows of `count` documents. All but the last have WINDOW documents."""
    return max(1, -(-(count // BLOCK) // (WINDOW // BLOCK)))


def blocks(count: int, key: str, window: int) -> list[tuple[int, int]]:
    """Return the blocks of a window in the order `key` of `count` documents, as (first, last + 1) documents each."""
    full = count // BLOCK
    first = window * (WINDOW // BLOCK)
    chosen = Permutation(full, key)(np.arange(first, min(first + WINDOW // BLOCK, full)))
    found = [(block * BLOCK, (block + 1) * BLOCK) for block in chosen.tolist()]
    if window == windows(count) - 1 and count % BLOCK:
        found.append((full * BLOCK, count))
    return found


def shuffled(key: str, window: int, documents: int) -> Ints:
    """Return the order of the documents of a window, as indices into those of its blocks: int64 [documents]."""
    return Permutation(documents, f"{key}, window {window}")(np.arange(documents))
