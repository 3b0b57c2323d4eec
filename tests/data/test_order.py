from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data import order, steps
from engine.data.corpus import Corpus
from engine.data.order import blocks, shuffled, windows
from engine.data.steps import Cursor, next_step


@pytest.fixture(scope="module", autouse=True)
def small_windows() -> object:
    """Windows of three blocks of four documents."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (order, steps):
            patch.setattr(module, "WINDOW", 12)
        patch.setattr(order, "BLOCK", 4)
        yield


def documents(count: int, key: str, window: int) -> list[int]:
    found = np.concatenate([np.arange(*block) for block in blocks(count, key, window)])
    return [int(document) for document in found[shuffled(key, window, len(found))]]


@given(st.integers(1, 200), st.text(max_size=3))
def test_every_document_is_in_one_window(count: int, key: str) -> None:
    found = [documents(count, key, window) for window in range(windows(count))]
    assert sorted(chain.from_iterable(found)) == list(range(count))
    assert all(len(one) == 12 for one in found[:-1]) and 0 < len(found[-1]) < 12 + 4


def test_blocks_and_their_documents_are_in_random_order() -> None:
    first, again, other = (documents(1200, key, 0) for key in ("a", "a", "b"))
    assert first == again != other
    assert len({document // 4 for document in first}) == 3 and first != sorted(first)
    assert len({tuple(blocks(1200, "a", window)) for window in range(100)}) == 100


@given(st.lists(st.integers(1, 9), min_size=1, max_size=70), st.integers(1, 40))
def test_steps_cross_windows_and_epochs(
    make_corpus: Callable[..., Corpus], lengths: list[int], batch_tokens: int
) -> None:
    """Every document once in an epoch, and the same steps from any cursor."""
    corpus, cursor, seen = make_corpus(lengths), Cursor(), list[int]()
    while cursor.epoch < 2:
        table, after = next_step(corpus, cursor, 7, batch_tokens, 100)
        assert after == next_step(corpus, cursor, 7, batch_tokens, 100)[1]
        seen += table.document.tolist()
        cursor = after
    count = len(lengths)
    assert sorted(seen[:count]) == sorted(seen[count : 2 * count]) == list(range(count))
