"""Assigns documents to steps and splits them into sequences, independently of the number of ranks.

Letters: S sequences of a step, N documents.

```
 epoch's order   d7 ------  d2 ---  d9 --------------  d1 --  | d4 ...
 steps           [ 0             ][ 1                     ][ 2        a step may cross into the next epoch
 context         |      |   |   |   |      |      |  |  |  |    documents longer than the context are split into pieces
```
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from engine.data.corpus import Corpus
from engine.data.order import WINDOW, blocks, shuffled, windows
from engine.units import Ints

_POOL = 16  # validation documents are chosen from this many times the inputs of the validation set


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """The sequences of a step. Each consists of inputs start .. start + length - 1 of a document; input 0 is BOS."""

    document: Ints  # [S] number of the document in the corpus
    start: Ints  # [S] first input of the sequence in its document
    length: Ints  # [S] number of inputs
    loss_tokens: Ints  # [S] number of labels that are not ignored

    def __len__(self) -> int:
        return len(self.document)


@dataclass(frozen=True)
class Cursor:
    """Where the next step begins: a position in the order of an epoch's documents."""

    epoch: int = 0
    position: int = 0


def piece_bounds(lengths: Ints, context: int) -> tuple[Ints, Ints, Ints]:
    """Split documents of `lengths` [N] inputs into pieces of at most `context` inputs.

    Returns, for each piece, the index of its document, its start in the document, and its length: three int64 [S].
    For example, a document of 10 inputs and a context of 4 give pieces with starts 0, 4, 8 and lengths 4, 4, 2.
    """
    pieces = -(-lengths // context)
    owner = np.repeat(np.arange(len(lengths), dtype=np.int64), pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)  # index of the first piece of the same document
    start = (np.arange(len(owner), dtype=np.int64) - first) * context
    return owner, start, np.minimum(context, lengths[owner] - start)


def fitting(lengths: Ints, tokens: int) -> int:
    """Return how many of `lengths` [N], taken in order, have a sum of at most `tokens`; at least 1."""
    return max(1, int(np.searchsorted(np.cumsum(lengths), tokens, side="right")))


def cut(documents: Ints, lengths: Ints, context: int) -> SequenceTable:
    """Split documents into sequences of at most `context` inputs.

    `documents` [N] are their numbers in the corpus, `lengths` [N] their inputs. Every input is in exactly one sequence,
    and its label is the next token of the document. Positions start at 0 in each sequence.
    """
    owner, start, length = piece_bounds(lengths, context)
    # Every label counts in the loss, because there are no loss masks yet.
    return SequenceTable(documents[owner], start, length, loss_tokens=length)


def next_step(
    corpus: Corpus, cursor: Cursor, seed: int, batch_tokens: int, context: int
) -> tuple[SequenceTable, Cursor]:
    """Return the sequences of the step at a cursor, and the cursor of the next step.

    A step takes documents in the random order of the epoch until the next one would exceed `batch_tokens` inputs. A
    document longer than `batch_tokens` forms a step of its own. A step may continue with documents of the next epoch.
    """
    taken, sizes = list[int](), list[int]()
    tokens, epoch, position = 0, cursor.epoch, cursor.position
    while True:
        number = min(position // WINDOW, windows(len(corpus)) - 1)
        window = _window(corpus, f"seed {seed}, epoch {epoch}", number)
        offset = position - number * WINDOW
        rest = zip(window.document[offset:].tolist(), window.trained[offset:].tolist(), strict=True)
        for document, length in rest:
            if taken and length and tokens + length > batch_tokens:
                table = cut(np.array(taken, dtype=np.int64), np.array(sizes, dtype=np.int64), context)
                return table, Cursor(epoch, position)
            if length:
                taken.append(document)
                sizes.append(length)
                tokens += length
            position += 1
        if position == len(corpus):
            epoch, position = epoch + 1, 0


def validation_table(corpus: Corpus, context: int, tokens: int) -> SequenceTable:
    """Return the validation set: pieces of validation documents, until the next would exceed `tokens` inputs.

    The pieces are shuffled, in the same way in every run, so that a small set covers many documents: they are from the
    first documents of a random order that have together 16 times as many inputs. The set has at least one piece if
    there are validation documents; it is empty if `tokens` is 0.
    """
    key, documents, lengths, found = "validation", list[int](), list[int](), 0
    for number in range(windows(len(corpus)) if tokens and corpus.validation_share else 0):
        window = _window(corpus, key, number)
        for document, length in zip(window.document.tolist(), window.validated.tolist(), strict=True):
            if length and found < _POOL * tokens:
                documents.append(document)
                lengths.append(length)
                found += length
        if found >= _POOL * tokens:
            break
    pieces = cut(np.array(documents, dtype=np.int64), np.array(lengths, dtype=np.int64), context)
    order = shuffled(key, -1, len(pieces))
    kept = order[: fitting(pieces.length[order], tokens) if len(order) else 0]
    return SequenceTable(
        pieces.document[kept], pieces.start[kept], pieces.length[kept], loss_tokens=pieces.loss_tokens[kept]
    )


class _Window(NamedTuple):
    """The documents of a window, in order. Lengths are 0 for documents that are not in the set."""

    document: Ints
    trained: Ints  # number of inputs
    validated: Ints


@lru_cache(maxsize=4)
def _window(corpus: Corpus, key: str, number: int) -> _Window:
    """Look up a window of the order `key`."""
    found = blocks(len(corpus), key, number)
    lengths, validation = map(np.concatenate, zip(*(corpus.inputs(*block) for block in found), strict=True))
    documents = np.concatenate([np.arange(*block) for block in found])
    order = shuffled(key, number, len(documents))
    return _Window(documents[order], np.where(validation, 0, lengths)[order], np.where(validation, lengths, 0)[order])
