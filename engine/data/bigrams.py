"""The bigram entropy of a corpus: the lowest loss that a model can reach from the previous token alone.

A model with a lower validation loss uses earlier tokens too, so its attention works. Only for the byte tokenizer: the
table of counts has V^2 entries of 8 bytes, 131 GB for a vocabulary V of 128K.
"""

from __future__ import annotations

import numpy as np

from engine.data.tokenizers.bytes import EOS, VOCAB
from engine.data.tokenizers.tokenizer import Ids
from engine.units import Ints

_BATCH = 1 << 20  # tokens to count in one call


class BigramCounts:
    """Counts pairs of adjacent tokens in documents, with the byte tokenizer."""

    def __init__(self) -> None:
        self._counts = np.zeros((VOCAB, VOCAB), dtype=np.int64)
        self._waiting: list[Ids] = []
        self._waiting_tokens = 0

    def add(self, document: Ids) -> None:
        """Count the pairs of one document, [n] ids with BOS and EOS."""
        self._waiting.append(document)
        self._waiting_tokens += len(document)
        if self._waiting_tokens >= _BATCH:  # many small documents are counted in one call
            self._count()

    def counts(self) -> Ints:
        """Return the counts of all pairs: int64 [VOCAB, VOCAB]."""
        self._count()
        return self._counts

    def merge(self, counts: Ints) -> None:
        """Add the counts of other documents."""
        self._counts += counts

    def entropy(self) -> float:
        """Return the entropy -sum p(a, b) log p(b | a) of token b after token a, in nats; 0 without documents."""
        counts = self.counts()
        before = np.broadcast_to(counts.sum(axis=1, keepdims=True), counts.shape)
        seen = counts > 0
        nats = counts[seen] * np.log(before[seen] / counts[seen])
        return float(nats.sum() / max(counts.sum(), 1))

    def _count(self) -> None:
        """Add the pairs of the waiting documents to the counts."""
        if self._waiting:
            tokens: Ints = np.concatenate(self._waiting).astype(np.int64)
            pairs = np.bincount(tokens[:-1] * VOCAB + tokens[1:], minlength=VOCAB * VOCAB)
            self._counts += pairs.reshape(VOCAB, VOCAB)
            self._counts[EOS] = 0  # (EOS, BOS) pairs across documents do not count
        self._waiting, self._waiting_tokens = [], 0
