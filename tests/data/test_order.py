from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data import order
from engine.data.order import Window, window, window_blocks
from engine.errors import DataError
from tests.data.memory import Memory
from tests.refusals import refused

MIB = 1 << 20
blocks_ = st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=40)
orders = st.sampled_from([1, 2])
sizes = st.one_of(st.integers(0, 3 * MIB), st.just(MIB))


@pytest.fixture(scope="module", autouse=True)
def small_windows() -> Iterator[None]:
    """Windows of 6 MiB, but at least 2 and at most 9 blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "WINDOW_BYTES", 6 * MIB)
        patch.setattr(order, "FEWEST", 2)
        patch.setattr(order, "MOST", 9)
        yield


def windows(corpus: Memory, key: str, number: int) -> list[tuple[int, Window]]:
    """The place of each window of an epoch, and the window."""
    found, place = list[tuple[int, Window]](), 0
    while place < corpus.blocks:
        found.append((place, window(corpus, key, number, place)))
        place += found[-1][1].blocks
    assert place == corpus.blocks
    return found


@given(blocks_, st.data(), st.text(max_size=3), orders)
def test_every_block_is_in_one_window(blocks: list[list[int]], data: st.DataObject, key: str, number: int) -> None:
    """A window ends with the block that fills it, and the last one with the epoch. In order 2 it may end before."""
    bytes_ = data.draw(st.lists(sizes, min_size=len(blocks), max_size=len(blocks)))
    corpus = Memory(blocks, bytes_=bytes_)
    found = list(window_blocks(corpus, key, number, 0))
    assert sorted(chain.from_iterable(found)) == list(range(len(blocks)))
    places = [place for place, _ in windows(corpus, key, number)]
    for at, (place, one) in enumerate(zip(places, found, strict=True)):
        assert list(window_blocks(corpus, key, number, place)) == found[at:], "a window depends on its place alone"
        most = max(1, place) if number == 2 else 9
        full = sum(bytes_[block] for block in one[:-1]) >= 6 * MIB
        assert len(one) <= min(most, 2 if full else 9)
        if at + 1 < len(found):
            assert min(most, 2) <= len(one)
            assert len(one) in (most, 9) or sum(bytes_[block] for block in one) >= 6 * MIB
    assert list(window_blocks(corpus, key, number, len(blocks))) == []


@given(st.integers(1, 300), st.integers(1, 3 * MIB))
def test_windows_grow_from_a_block_to_those_of_the_first_order(blocks: int, bytes_: int) -> None:
    corpus = Memory([[1]] * blocks, bytes_=bytes_)
    sizes_ = [len(one) for one in window_blocks(corpus, "k", 2, 0)]
    largest = len(next(window_blocks(corpus, "k", 1, 0)))
    place, expected = 0, list[int]()
    while place < blocks:
        expected.append(min(max(1, place), largest, blocks - place))
        place += expected[-1]
    assert sizes_ == expected
    assert [len(one) for one in window_blocks(corpus, "k", 1, 0)] == [
        min(largest, blocks - place) for place in range(0, blocks, largest)
    ]


@given(blocks_, st.text(max_size=3), st.sets(st.integers(0, 240)), orders)
def test_every_document_with_an_input_is_on_one_side_of_one_window(
    blocks: list[list[int]], key: str, validation: set[int], order_number: int
) -> None:
    corpus = Memory(blocks, validation=sorted(validation))
    sides = Counter[tuple[int, bool, int, int]]()
    for _, found in windows(corpus, key, order_number):
        for validated, side in ((False, found.trained), (True, found.validated)):
            for block, document, inputs, content in zip(*(column.tolist() for column in side), strict=True):
                number = corpus.number(block, document)
                assert content == corpus.hash_of(number)
                sides[number, validated, block, inputs] += 1
    expected = {
        (corpus.number(block, document), corpus.number(block, document) in validation, block, inputs)
        for block, lengths in enumerate(blocks)
        for document, inputs in enumerate(lengths)
        if inputs
    }
    assert sides == Counter(expected)


def test_a_share_of_one_holds_out_every_document() -> None:
    corpus = Memory([[3, 4], [5]], share=1.0)
    (only,) = (found for _, found in windows(corpus, "k", 1))
    assert len(only.trained.inputs) == 0 and sorted(only.validated.inputs.tolist()) == [3, 4, 5]


def test_only_the_blocks_of_a_window_are_opened() -> None:
    corpus = Memory([[1]] * 40)
    chosen = next(window_blocks(corpus, "k", 2, 12))
    assert corpus.opened == [] and len(chosen) == 6
    window(corpus, "k", 2, 12)
    assert corpus.opened == chosen


def test_blocks_and_their_documents_are_in_random_order() -> None:
    corpus = Memory([[1] * 50] * 300)

    def documents(key: str, place: int) -> list[tuple[int, int]]:
        found = window(corpus, key, 1, place).trained
        return list(zip(found.block.tolist(), found.document.tolist(), strict=True))

    first, again, other = (documents(key, 0) for key in ("a", "a", "b"))
    assert first == again != other and len(first) == 300
    runs = sum(before[0] != after[0] for before, after in pairwise(first))
    assert runs > 200, "documents of a block follow each other rarely"
    assert len({*map(tuple, window_blocks(corpus, "a", 1, 0))}) == 50
    numbers = [document for _, document in documents("a", 0)]
    assert numbers != [document for _, document in documents("a", 6)], "each window has an order of its own"


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1, [[9, 7, 10, 1], [2, 3, 12, 8], [6, 5, 11, 4]]),
        (2, [[7], [1], [12, 10, 9], [6, 2, 4, 3, 5, 8], [11]]),
    ],
)
def test_the_order_of_a_key_is_the_same_on_every_machine(number: int, expected: list[list[int]]) -> None:
    """A run that resumes with another numpy must see the documents in the same order."""
    corpus = Memory([[1], [2, 3], [4, 5, 6], [7], [8], [9, 10], [11], [12]], bytes_=2 * MIB)
    found = [one.trained.inputs.tolist() for _, one in windows(corpus, "seed 7, source data, epoch 0", number)]
    assert found == expected


def test_a_place_beyond_the_blocks_is_refused() -> None:
    """A run that is resumed with fewer documents must not look for a window for ever."""
    corpus = Memory([[1], [1]])
    assert list(window_blocks(corpus, "a", 2, 2)) == []
    with refused(DataError, "memory data") as problems:
        next(window_blocks(corpus, "a", 2, 3))
    assert "2 blocks" in problems[0].message and "block 3" in problems[0].message
