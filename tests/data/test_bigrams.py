from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from engine.data import bigrams
from engine.data.bigrams import BigramCounts
from engine.data.tokenizers.bytes import BOS, EOS
from engine.data.tokenizers.load import open_tokenizer

encode = open_tokenizer("bytes").document


def reference(texts: list[bytes]) -> float:
    """H(next | token) = -sum p(a, b) log p(b | a), counted pair by pair."""
    pairs: Counter[tuple[int, int]] = Counter()
    for text in texts:
        tokens = [BOS, *text, EOS]
        pairs.update(pairwise(tokens))
    before: Counter[int] = Counter()
    for (first, _), count in pairs.items():
        before[first] += count
    return -sum(n / pairs.total() * math.log(n / before[first]) for (first, _), n in pairs.items())


def entropy(texts: list[bytes]) -> float:
    counts = BigramCounts()
    for text in texts:
        counts.add(encode(text))
    return counts.entropy()


@pytest.mark.parametrize("batch", [1, 40, 1 << 20])
def test_entropy_equals_the_sum_over_pairs(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any batch size: no pair spans two documents."""
    monkeypatch.setattr(bigrams, "_BATCH", batch)
    random = np.random.default_rng(0)
    texts = [random.integers(97, 102, size=size, dtype=np.uint8).tobytes() for size in (1, 2, 30, 100)]
    assert entropy(texts) == pytest.approx(reference(texts), rel=1e-12)


def test_a_deterministic_text_has_no_entropy() -> None:
    assert entropy([b"abcdef"]) == 0


def test_two_equally_likely_next_bytes_cost_log_two() -> None:
    """Only the two pairs that begin with BOS are uncertain; the two that end with EOS are not."""
    assert entropy([b"x", b"y"]) == pytest.approx(math.log(2) / 2)


def test_no_documents_have_no_entropy() -> None:
    assert entropy([]) == 0
