from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.corpus import Corpus
from engine.data.steps import Cursor, SequenceTable, cut, fitting, next_step, validation_table

MakeCorpus = Callable[..., Corpus]
lengths_ = st.lists(st.integers(2, 60), min_size=1, max_size=30)
sizes = st.integers(1, 80)


def pieces(table: SequenceTable) -> list[tuple[int, int, int]]:
    return list(zip(table.document.tolist(), table.start.tolist(), table.length.tolist(), strict=True))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 60))
def test_fitting_takes_at_least_one(lengths: list[int], tokens: int) -> None:
    count = fitting(np.array(lengths), tokens)
    assert count == 1 or sum(lengths[:count]) <= tokens
    assert count == len(lengths) or sum(lengths[: count + 1]) > tokens


def epochs(corpus: Corpus, seed: int, batch: int, context: int, count: int) -> list[tuple[SequenceTable, Cursor]]:
    """All steps of the first `count` epochs."""
    steps, cursor = [], Cursor()
    while cursor.epoch < count:
        table, cursor = next_step(corpus, cursor, seed, batch, context)
        steps.append((table, cursor))
    return steps


def test_cut_splits_and_drops_nothing() -> None:
    table = cut(np.array([1, 0, 1]), np.array([10, 4, 10]), context=4)
    once = [(1, 0, 4), (1, 4, 4), (1, 8, 2)]
    assert pieces(table) == [*once, (0, 0, 4), *once]
    assert table.loss_tokens.tolist() == table.length.tolist()


@given(lengths_, sizes, sizes, st.integers(0, 2**63 - 1))
def test_an_epoch_has_every_input_and_label_exactly_once_and_in_order(
    make_corpus: MakeCorpus, lengths: list[int], batch: int, context: int, seed: int
) -> None:
    """Steps may cross epochs, so the first sum(lengths) inputs of the run are the first epoch."""
    corpus = make_corpus(lengths)
    wanted = sum(lengths)
    covered = [
        (document, position)
        for table, _ in epochs(corpus, seed, batch, context, count=1)
        for document, start, length in pieces(table)
        for position in range(start, start + length)
    ][:wanted]
    assert Counter(covered) == Counter((d, p) for d, length in enumerate(lengths) for p in range(length))
    boundaries = pairwise(covered)
    assert all(after == (before[0], before[1] + 1) or after[1] == 0 for before, after in boundaries)


@given(lengths_, sizes, sizes)
def test_a_step_is_as_full_as_it_can_be(make_corpus: MakeCorpus, lengths: list[int], batch: int, context: int) -> None:
    steps = epochs(make_corpus(lengths), 3, batch, context, count=2)
    for (table, _), (following, _) in pairwise(steps):
        tokens = int(table.length.sum())
        document = following.document[0]
        assert tokens <= batch or len(set(table.document.tolist())) == 1
        assert tokens + lengths[document] > batch
        assert table.length.max() <= context


@given(lengths_, sizes, sizes, st.integers(1, 5))
def test_a_run_continues_identically_from_any_saved_cursor(
    make_corpus: MakeCorpus, lengths: list[int], batch: int, context: int, seed: int
) -> None:
    corpus = make_corpus(lengths)
    steps = epochs(corpus, seed, batch, context, count=3)
    for (_, cursor), (following, after) in pairwise(steps):
        table, resumed = next_step(corpus, Cursor(cursor.epoch, cursor.position), seed, batch, context)
        assert (pieces(table), resumed) == (pieces(following), after)


def test_a_longer_document_is_a_step_by_itself(make_corpus: MakeCorpus) -> None:
    steps = [table.document.tolist() for table, _ in epochs(make_corpus([3, 50, 3]), 0, 10, 100, count=1)]
    assert [1] in steps


def test_the_rest_of_an_epoch_joins_the_next(make_corpus: MakeCorpus) -> None:
    table, cursor = next_step(make_corpus([4, 4, 4]), Cursor(), 0, batch_tokens=16, context=8)
    assert table.length.sum() == 16
    assert sorted(table.document.tolist()[:3]) == [0, 1, 2]
    assert cursor == Cursor(1, 1)


def test_validation_documents_are_never_trained_on(make_corpus: MakeCorpus) -> None:
    corpus = make_corpus([5] * 10, validation=[2, 7])
    trained = {d for table, _ in epochs(corpus, 0, 12, 5, count=3) for d in table.document.tolist()}
    assert trained == set(range(10)) - {2, 7}


def test_the_order_depends_on_seed_and_epoch_only(make_corpus: MakeCorpus) -> None:
    corpus = make_corpus([5] * 50)

    def order(seed: int, epoch: int) -> list[int]:
        return next_step(corpus, Cursor(epoch), seed, 250, 5)[0].document.tolist()

    assert order(0, 0) == order(0, 0)
    assert sorted(order(0, 0)) == list(range(50))
    assert len({tuple(order(seed, epoch)) for seed in (0, 1, 2**63 - 1) for epoch in range(3)}) == 9


def test_the_order_of_a_seed_is_the_same_on_every_machine(make_corpus: MakeCorpus) -> None:
    """A run that resumes with another numpy must see the documents in the same order."""
    table, _ = next_step(make_corpus([1] * 8), Cursor(), 7, batch_tokens=8, context=1)
    assert table.document.tolist() == [0, 5, 1, 3, 6, 2, 4, 7]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (0, []),
        (1, [(3, 0, 3)]),
        (4, [(3, 0, 3)]),
        (9, [(3, 0, 3), (1, 0, 4), (1, 8, 2)]),
        (12, [(3, 0, 3), (1, 0, 4), (1, 8, 2)]),
        (13, [(3, 0, 3), (1, 0, 4), (1, 8, 2), (1, 4, 4)]),
        (99, [(3, 0, 3), (1, 0, 4), (1, 8, 2), (1, 4, 4)]),
    ],
)
def test_the_validation_set_is_as_large_as_fits(
    tokens: int, expected: list[tuple[int, int, int]], make_corpus: MakeCorpus
) -> None:
    """Shuffled: in the order of names, a small set would be one or two documents."""
    corpus = make_corpus([7, 10, 7, 3], validation=[1, 3])
    assert pieces(validation_table(corpus, context=4, tokens=tokens)) == expected


def test_without_validation_documents_the_set_is_empty(make_corpus: MakeCorpus) -> None:
    assert len(validation_table(make_corpus([7, 10]), context=4, tokens=100)) == 0
