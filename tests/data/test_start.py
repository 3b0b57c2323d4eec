"""What a start packs: not much more than the first step and the validation set need."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from engine.data.steps import Cursor
from tests.data.memory import Memory, config_of, run, steps_of

MIB = 1 << 20
sizes = st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=60)


@given(st.lists(sizes, min_size=1, max_size=5), st.integers(1, 200 * MIB))
def test_of_each_source_at_most_twice_the_blocks_of_its_part_of_a_step_are_packed(
    sources: list[list[int]], tokens: int
) -> None:
    """However large blocks are, and however many sources there are. A token is a byte here."""
    corpora = [Memory([[1]] * len(bytes_), str(number), bytes_=bytes_) for number, bytes_ in enumerate(sources)]
    said = list(steps_of(corpora, config_of(20, 5)).upcoming(Cursor(order=2), tokens))
    assert not any(corpus.opened for corpus in corpora)
    for corpus, bytes_ in zip(corpora, sources, strict=True):
        blocks = [block for name, block in said if name == corpus.name]
        part = tokens / len(corpora)
        sums = list(accumulate(bytes_[block] for block in blocks))
        needed = next((count for count, sum_ in enumerate(sums, 1) if sum_ >= part - 1), len(bytes_))
        assert needed <= len(blocks) <= max(1, 2 * (needed - 1)) or len(blocks) == len(bytes_)


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=60),
    st.integers(1, 60),
    st.integers(0, 9),
)
def test_at_most_twice_the_blocks_whose_documents_have_been_used_are_opened(
    blocks: list[list[int]], batch: int, seed: int
) -> None:
    """And one, whatever the lengths of documents are."""
    corpus, taken = Memory(blocks), Counter[int]()
    steps, cursor = steps_of([corpus], config_of(batch, 100, seed)), Cursor(order=2)
    while cursor.places.get("data", (0,))[0] == 0:
        ((table, cursor),) = run(steps, 1, cursor)
        if cursor.places["data"].epoch:
            break
        taken.update(table.block.tolist())  # no document is split
        used = sum(count == len(blocks[block]) for block, count in taken.items())
        assert len({*corpus.opened}) <= 2 * used + 1
