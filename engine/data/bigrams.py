"""The bigram entropy of a corpus: what a model can reach that sees only the token before.

A model whose validation loss is lower has learnt something from further back, which only attention can give.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.data.tokenizer import EOS, VOCAB, encode

_BATCH = 1 << 20  # tokens that are counted in one call


class BigramCounts:
    """Counts how often a token follows another, over documents."""

    def __init__(self) -> None:
        self._counts = np.zeros((VOCAB, VOCAB), dtype=np.int64)
        self._waiting: list[bytes] = []
        self._waiting_tokens = 0

    def add(self, text: bytes) -> None:
        """Count a document's pairs, BOS and EOS included. Many small documents are counted in one call."""
        self._waiting.append(text)
        self._waiting_tokens += len(text) + 2
        if self._waiting_tokens >= _BATCH:
            self._count()

    def entropy(self) -> float:
        """Return H(next token | token) in nats a token: -sum p(a, b) log p(b | a); 0 for no documents."""
        self._count()
        counts = self._counts
        before = np.broadcast_to(counts.sum(axis=1, keepdims=True), counts.shape)
        seen = counts > 0
        nats = counts[seen] * np.log(before[seen] / counts[seen])
        return float(nats.sum() / max(counts.sum(), 1))

    def _count(self) -> None:
        if self._waiting:
            tokens: NDArray[np.int64] = np.concatenate([encode(text) for text in self._waiting])
            pairs = np.bincount(tokens[:-1] * VOCAB + tokens[1:], minlength=VOCAB * VOCAB)
            self._counts += pairs.reshape(VOCAB, VOCAB)
            self._counts[EOS] = 0  # from one document to the next
        self._waiting, self._waiting_tokens = [], 0
