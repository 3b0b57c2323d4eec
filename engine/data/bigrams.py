"""The bigram entropy of a corpus: the lowest loss that a model can reach from the previous token alone.

A model with a lower validation loss uses earlier tokens too, so its attention works. Only for the byte tokenizer: the
table of counts has V^2 entries of 8 bytes, 131 GB for a vocabulary V of 128K.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.data.tokenizer import EOS, VOCAB, encode
from engine.units import Ints

_BATCH = 1 << 20  # tokens to count in one call


class BigramCounts:
    """Counts pairs of adjacent tokens in documents, with the byte tokenizer."""

    def __init__(self) -> None:
        self._counts = np.zeros((VOCAB, VOCAB), dtype=np.int64)
        self._waiting: list[bytes] = []
        self._waiting_tokens = 0

    def add(self, text: bytes) -> None:
        """Count the pairs of one document, including BOS and EOS."""
        self._waiting.append(text)
        self._waiting_tokens += len(text) + 2
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
            tokens: NDArray[np.int64] = np.concatenate([encode(text) for text in self._waiting])
            pairs = np.bincount(tokens[:-1] * VOCAB + tokens[1:], minlength=VOCAB * VOCAB)
            self._counts += pairs.reshape(VOCAB, VOCAB)
            self._counts[EOS] = 0  # (EOS, BOS) pairs across documents do not count
        self._waiting, self._waiting_tokens = [], 0
