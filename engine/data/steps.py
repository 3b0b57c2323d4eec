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

import numpy as np

from engine.data.corpus import Corpus
from engine.units import Ints


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
    owner, start, length = piece_bounds(corpus.lengths[documents], context)
    # Every label counts in the loss, because there are no loss masks yet.
    return SequenceTable(documents[owner], start, length, loss_tokens=length)


def next_step(
    corpus: Corpus, cursor: Cursor, seed: int, batch_tokens: int, context: int
) -> tuple[SequenceTable, Cursor]:
    """Return the sequences of the step at a cursor, and the cursor of the next step.

    A step takes documents in the random order of the epoch until the next one would exceed `batch_tokens` inputs. A
    document longer than `batch_tokens` forms a step of its own. A step may continue with documents of the next epoch.
    """
    documents: list[int] = []
    tokens = 0
    # Documents are added one by one, because `fitting` would sum over the rest of the epoch in every step.
    while True:
        order = _order(len(corpus.training), seed, cursor.epoch)
        document = int(corpus.training[order[cursor.position]])
        length = int(corpus.lengths[document])
        if documents and tokens + length > batch_tokens:
            return cut(np.array(documents, dtype=np.int64), corpus, context), cursor
        documents.append(document)
        tokens += length
        last = cursor.position + 1 == len(order)
        cursor = Cursor(cursor.epoch + 1, 0) if last else Cursor(cursor.epoch, cursor.position + 1)


def validation_table(corpus: Corpus, context: int, tokens: int) -> SequenceTable:
    """Return the validation set: pieces of validation documents, until the next would exceed `tokens` inputs.

    The pieces are shuffled, in the same way in every run, so that a small set covers many documents. The set has at
    least one piece if there are validation documents; it is empty if `tokens` is 0.
    """
    pieces = cut(np.flatnonzero(corpus.validation).astype(np.int64), corpus, context)
    order = _order(len(pieces), seed=0, epoch=0)
    kept = order[: fitting(pieces.length[order], tokens) if tokens else 0]
    return SequenceTable(
        pieces.document[kept], pieces.start[kept], pieces.length[kept], loss_tokens=pieces.loss_tokens[kept]
    )


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> Ints:
    """Return a random order of `count` documents for an epoch: a permutation of 0 .. count - 1, int64 [count].

    It sorts raw numbers of Philox, which are the same in all versions of numpy, unlike the results of `permutation`.
    """
    generator = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
    return np.argsort(generator.random_raw(count), kind="stable")
