"""Which documents are in which step, and the sequences that they are cut into. No rank and no worker enters it.

Letters: S sequences of a step, N documents.

```
 epoch's order   d7 ------  d2 ---  d9 --------------  d1 --  | d4 ...
 steps           [ 0             ][ 1                     ][ 2        a step may cross into the next epoch
 context         |      |   |   |   |      |      |  |  |  |    and a longer document is cut into pieces
```
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np

from engine.data.index import Index
from engine.planner.plan import Ints


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """The sequences of a step: inputs start .. start + length of a document, in tokens from its BOS."""

    document: Ints  # [S] number in the index
    start: Ints  # [S]
    length: Ints  # [S] inputs
    loss_tokens: Ints  # [S] labels that are not ignored

    def __len__(self) -> int:
        """Return S."""
        return len(self.document)


@dataclass(frozen=True)
class Cursor:
    """Where the next step begins: a place in the order of an epoch's documents."""

    epoch: int = 0
    position: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return the cursor as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: dict[str, int]) -> Cursor:
        """Return the cursor that `to_dict` described."""
        return cls(epoch=state["epoch"], position=state["position"])


def piece_bounds(lengths: Ints, context: int) -> tuple[Ints, Ints, Ints]:
    """Return for each piece of at most `context` inputs its document (a place in `lengths`), its start and its length.

    All int64[S]. A document of 10 inputs and a context of 4 give the pieces 0..4, 4..8 and 8..10.
    """
    pieces = -(-lengths // context)
    owner = np.repeat(np.arange(len(lengths), dtype=np.int64), pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)  # number of the first piece of the same document
    start = (np.arange(len(owner), dtype=np.int64) - first) * context
    return owner, start, np.minimum(context, lengths[owner] - start)


def fitting(lengths: Ints, tokens: int) -> int:
    """Return how many of `lengths` [N], in their order, come before the next would pass `tokens`; at least one."""
    return max(1, int(np.searchsorted(np.cumsum(lengths), tokens, side="right")))


def cut(documents: Ints, index: Index, context: int) -> SequenceTable:
    """Return the sequences of documents. Every input is in exactly one, and each has the token after it as its label.

    Positions start at 0 in each piece; the last label of a piece is the first token of the next.
    """
    owner, start, length = piece_bounds(index.lengths[documents], context)
    return SequenceTable(documents[owner], start, length, loss_tokens=length)


def next_step(index: Index, cursor: Cursor, seed: int, batch_tokens: int, context: int) -> tuple[SequenceTable, Cursor]:
    """Return a step's sequences and where the following step begins.

    A step takes documents in order until the next would pass `batch_tokens` inputs; a longer document is a step of its
    own. What an epoch leaves joins the next epoch. One by one and not by `fitting`, which would add up all that is left
    of an epoch for each step.
    """
    documents: list[int] = []
    tokens = 0
    while True:
        order = _order(len(index.training), seed, cursor.epoch)
        document = int(index.training[order[cursor.position]])
        length = int(index.lengths[document])
        if documents and tokens + length > batch_tokens:
            return cut(np.array(documents, dtype=np.int64), index, context), cursor
        documents.append(document)
        tokens += length
        cursor = _after(cursor, len(order))


def validation_table(index: Index, context: int, tokens: int) -> SequenceTable:
    """Return the fixed set to validate on: pieces of the validation documents while they fit into `tokens` inputs.

    Pieces come in an order of their own, the same in every run, so that a small set still meets many documents. At
    least one piece if there is any document; none if `tokens` is 0.
    """
    pieces = cut(np.flatnonzero(index.validation).astype(np.int64), index, context)
    order = _order(len(pieces), seed=0, epoch=0)
    return _select(pieces, order[: fitting(pieces.length[order], tokens) if tokens else 0])


@lru_cache(maxsize=2)
def _order(count: int, seed: int, epoch: int) -> Ints:
    """Return the order of an epoch's training documents, a permutation of `count` numbers.

    numpy keeps the raw numbers of Philox the same in all its versions, but not what `permutation` makes of them.
    """
    generator = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
    return np.argsort(generator.random_raw(count), kind="stable")


def _after(cursor: Cursor, documents: int) -> Cursor:
    if cursor.position + 1 < documents:
        return Cursor(cursor.epoch, cursor.position + 1)
    return Cursor(cursor.epoch + 1, 0)


def _select(table: SequenceTable, rows: Ints) -> SequenceTable:
    return SequenceTable(table.document[rows], table.start[rows], table.length[rows], table.loss_tokens[rows])
