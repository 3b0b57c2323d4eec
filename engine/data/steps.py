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

import numpy as np

from engine.data.corpus import Corpus
from engine.data.permute import Permutation
from engine.units import Ints

_AHEAD = 1024  # documents of the order that are looked up at a time
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


def cut(documents: Ints, corpus: Corpus, context: int) -> SequenceTable:
    """Split documents into sequences of at most `context` inputs. `documents` [N] are numbers in the corpus.

    Every input is in exactly one sequence, and its label is the next token of the document. Positions start at 0 in
    each sequence.
    """
    owner, start, length = piece_bounds(corpus.lengths(documents), context)
    # Every label counts in the loss, because there are no loss masks yet.
    return SequenceTable(documents[owner], start, length, loss_tokens=length)


def next_step(
    corpus: Corpus, cursor: Cursor, seed: int, batch_tokens: int, context: int
) -> tuple[SequenceTable, Cursor]:
    """Return the sequences of the step at a cursor, and the cursor of the next step.

    A step takes documents in the random order of the epoch until the next one would exceed `batch_tokens` inputs. A
    document longer than `batch_tokens` forms a step of its own. A step may continue with documents of the next epoch.
    """
    taken: list[int] = []
    tokens, epoch, position = 0, cursor.epoch, cursor.position
    while True:
        stop = min(position + _AHEAD, len(corpus))
        documents = Permutation(len(corpus), f"{seed} {epoch}")(np.arange(position, stop))
        lengths = np.where(corpus.validation(documents), 0, corpus.lengths(documents))
        for document, length in zip(documents.tolist(), lengths.tolist(), strict=True):
            if taken and length and tokens + length > batch_tokens:
                return cut(np.array(taken, dtype=np.int64), corpus, context), Cursor(epoch, position)
            if length:  # for training
                taken.append(document)
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
    kept, order = [np.empty(0, dtype=np.int64)], Permutation(len(corpus), "validation set")
    found = 0
    for first in range(0, len(corpus) if tokens and corpus.validation_share else 0, _AHEAD):
        documents = order(np.arange(first, min(first + _AHEAD, len(corpus))))
        documents = documents[corpus.validation(documents)]
        few = _POOL * tokens - found
        count = min(len(documents), 1 + int(np.searchsorted(np.cumsum(corpus.lengths(documents)), few)))
        kept.append(documents[:count])
        found += int(corpus.lengths(documents[:count]).sum())
        if found >= _POOL * tokens:
            break
    pieces = cut(np.concatenate(kept), corpus, context)
    shuffled = Permutation(len(pieces), "validation pieces")(np.arange(len(pieces)))
    chosen = shuffled[: fitting(pieces.length[shuffled], tokens)]
    return SequenceTable(
        pieces.document[chosen], pieces.start[chosen], pieces.length[chosen], loss_tokens=pieces.loss_tokens[chosen]
    )
