"""The sequences of a step: pieces of documents, each with its labels.

Letters: S sequences, N documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from engine.data.blocks.blocks import masked_within
from engine.data.corpus import Corpus, chosen_lengths
from engine.data.order import Documents
from engine.units import Ints


@dataclass(frozen=True, eq=False)
class SequenceTable:
    """The sequences of a step. Each consists of inputs start .. start + length - 1 of a document; input 0 is BOS."""

    source: Ints  # [S] number of the corpus
    block: Ints  # [S] number of the block in the corpus
    document: Ints  # [S] number of the document in the block
    start: Ints  # [S] first input of the sequence in its document
    length: Ints  # [S] number of inputs
    loss_tokens: Ints  # [S] number of labels that are not ignored
    hash: NDArray[np.uint64]  # [S] of the content of the document; in another tool's token file, of its number

    def __len__(self) -> int:
        return len(self.document)

    def chosen(self, sequences: Ints | slice) -> SequenceTable:
        """Return the table of some sequences."""
        return SequenceTable(*(getattr(self, column.name)[sequences] for column in fields(self)))


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


def sequences_of(
    corpora: Sequence[Corpus], source: Ints, documents: Documents, begin: Ints, inputs: Ints, context: int
) -> SequenceTable:
    """Split parts of N documents of the corpora `source` [N] into sequences of at most `context` inputs.

    A part has `inputs` [N] inputs from `begin` [N] on. Every input is in exactly one sequence, and its label is the
    next token of the document. Positions start at 0 in each sequence.
    """
    owner, start, length = piece_bounds(inputs, context)
    start += begin[owner]
    of = documents.chosen(owner)
    table = SequenceTable(source[owner], of.block, of.document, start, length, length, of.hash)
    return replace(table, loss_tokens=_loss_tokens(corpora, table))


def _loss_tokens(corpora: Sequence[Corpus], table: SequenceTable) -> Ints:
    """Return how many labels of each sequence count in the loss, int64 [S]."""
    counted: Ints = table.length.copy()
    # The sequences of each block, which is opened once.
    order = np.lexsort((table.block, table.source))
    of_block = table.chosen(order)
    begins = np.flatnonzero(np.diff(of_block.source, prepend=-1) | np.diff(of_block.block, prepend=-1))
    for first, last in pairwise([*begins.tolist(), len(order)]):
        some = of_block.chosen(slice(first, last))
        corpus, block = corpora[int(some.source[0])], int(some.block[0])
        lengths = chosen_lengths(corpus, block, some.document, some.hash)
        start = some.start + 1  # the label of an input is the next token
        counted[order[first:last]] -= masked_within(lengths, some.document, start, start + some.length)
    return counted
