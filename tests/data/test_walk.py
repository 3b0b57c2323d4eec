"""Segments with lengths: documents wait for a segment that takes them, and each is used once or counted.

The reference has a table of all documents of the epochs, in their order, and of those that were taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.schema import Segment
from engine.data import order
from engine.data.order import ORDER
from engine.data.steps import Cursor, Steps, waiting_at
from engine.data.walk import Place, never_taken
from engine.errors import DataError
from tests.data.memory import Exhausted, Memory, config_of, run, steps_of
from tests.data.resuming import StepsFrom, resumes_exactly
from tests.refusals import refused

MIB = 1 << 20
LONGEST = 60
blocks_ = st.lists(st.lists(st.integers(0, LONGEST), max_size=5), min_size=1, max_size=14).filter(
    lambda blocks: any(map(any, blocks))
)
bounds_ = st.tuples(st.integers(1, LONGEST), st.integers(1, LONGEST)).map(lambda pair: (min(pair), max(pair)))
lengths_ = st.lists(st.one_of(st.none(), bounds_), min_size=1, max_size=3)


@pytest.fixture(scope="module", autouse=True)
def small_windows() -> Iterator[None]:
    """Windows of 4 blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "WINDOW_BYTES", 4 * MIB)
        yield


def mix_of(lengths: Sequence[tuple[int, int] | None], names: str = "a", every: int = 3) -> list[Segment]:
    """A segment of `every` steps for each of some lengths."""
    weights = dict.fromkeys(names, 1.0)
    return [Segment(weights=weights, step=number * every or None, lengths=one) for number, one in enumerate(lengths)]


def in_order(steps: Steps, name: str, epochs: int) -> Iterator[tuple[Place, int, int, int]]:
    """The place, block, number and inputs of each document of a source in its order."""
    number = [corpus.name for corpus in steps.corpora].index(name)
    for epoch in range(epochs):
        window = 0
        while window < steps.corpora[number].blocks:
            documents, blocks = steps._window(name, ORDER, epoch, window)
            for at, (block, document, inputs) in enumerate(zip(*(one.tolist() for one in documents[:3]), strict=True)):
                yield Place(epoch, window, at), block, document, inputs
            window += blocks


def taken_in(steps: Steps, most: int) -> Iterator[tuple[Cursor, Cursor, list[tuple[int, int, int, int]]]]:
    """Each step: the cursors before and after it, and source, block, number and inputs of what it takes."""
    cursor = Cursor(order=ORDER)
    while cursor.step < most and (found := steps.next(cursor)) is not None:
        table, after = found
        columns = table.source, table.block, table.document, table.length
        yield cursor, after, list(zip(*(one.tolist() for one in columns), strict=True))
        cursor = after


@given(blocks_, lengths_, st.sampled_from(["repeat", "drop", "stop"]), st.integers(0, 3), st.integers(20, 90))
@settings(max_examples=120, deadline=None)
def test_the_earliest_documents_of_the_lengths_are_taken_and_the_others_wait(
    blocks: list[list[int]], lengths: list[tuple[int, int] | None], policy: Exhausted, seed: int, batch: int
) -> None:
    """The last segment takes all. Every document of the order is taken once, waits, or comes later."""
    steps = steps_of([Memory(blocks, "a")], config_of(batch, LONGEST, seed), mix_of([*lengths, None]), policy)
    orders = [*in_order(steps, "a", 3 if policy == "repeat" else 1)]
    taken = set[Place]()
    try:
        for before, after, documents in taken_in(steps, 3 * len(lengths) + 6):
            segment = min(before.step // 3, len(lengths))
            least, most = [*lengths, None][segment] or (1, LONGEST)
            for _, block, document, inputs in documents:
                wanted = next(
                    (one for one in orders if one[0] not in taken and least <= one[3] <= most), (None, -1, -1, -1)
                )
                assert wanted[0] is not None or policy == "repeat"
                if wanted[0] is None:
                    return  # beyond the epochs of the reference
                assert wanted[1:] == (block, document, inputs)
                taken.add(wanted[0])
            place, waiting = after.places["a"], after.waiting.get("a", ())
            assert all(at in taken for at in taken if at < place) and max(taken) < place
            passed = Counter[int]()
            for at, _, _, inputs in orders:
                if at < place and at not in taken:
                    (one,) = (one for one in waiting if one.least <= inputs <= one.most)
                    assert one.place <= at
                    passed[one.least] += 1
            assert passed == {one.least: one.documents for one in waiting}
    except DataError as error:  # no document has the lengths of a segment
        assert "no document of" in error.problems[0].message


@given(blocks_, blocks_, lengths_, st.sampled_from(["repeat", "drop", "stop"]), st.sampled_from(["step", "split"]))
@settings(max_examples=40, deadline=None)
def test_a_run_with_lengths_continues_identically_from_any_saved_cursor(
    first: list[list[int]], second: list[list[int]], lengths: list[tuple[int, int] | None], policy: Exhausted, long: str
) -> None:
    corpora = [Memory(first, "a"), Memory(second, "b")]
    config, mix = config_of(40, 16, 1, long), mix_of([*lengths, None, (1, 20), None], "ab", 2)  # type: ignore[arg-type]
    try:
        resumes_exactly(lambda state: StepsFrom(steps_of(corpora, config, mix, policy), state), most=12)
    except DataError as error:
        assert "no document of" in error.problems[0].message


@pytest.mark.parametrize("policy", ["drop", "stop"])
def test_over_all_segments_each_document_is_used_exactly_once_or_waits(policy: Exhausted) -> None:
    """Long-short stages. Only documents of a length that the last segments do not take are left, and are counted."""
    blocks = [[(7 * number + 13 * block) % 60 + 1 for number in range(9)] for block in range(24)]
    corpus = Memory(blocks, "a")
    mix = mix_of([(1, 20), (1, 40), (15, 60)], every=12)
    steps = steps_of([corpus], config_of(60, 60), mix, policy)
    used, cursor = Counter[tuple[int, int]](), Cursor()
    for _, after, documents in taken_in(steps, 1000):
        cursor = after
        used.update((block, document) for _, block, document, _ in documents)
    assert set(used.values()) == {1} and steps.ended(cursor) is not None
    left = {(block, number) for block, one in enumerate(blocks) for number in range(len(one))} - {*used}
    assert left and all(blocks[block][number] < 15 for block, number in left)
    segments = steps._segments
    assert waiting_at(cursor, segments) == {"a": (0, len(left))}
    early = run(steps, 2)[-1][1]
    assert early.step < 12 and waiting_at(early, segments)["a"][1] == 0 < waiting_at(early, segments)["a"][0]


def test_a_split_document_goes_on_in_the_segment_that_takes_it() -> None:
    """One that is partly taken when its segment ends waits with its place."""
    corpus = Memory([[50, 5, 5, 5, 5, 5, 5, 5]], "a")
    mix = [
        Segment(weights={"a": 1}, lengths=(50, 50)),
        Segment(weights={"a": 1}, step=2, lengths=(1, 9)),
        Segment(weights={"a": 1}, step=4),
    ]
    found = run(steps_of([corpus], config_of(10, 10, long="split"), mix, "drop"), 100)
    inputs = Counter[tuple[int, int]]()
    for table, _ in found:
        for document, start, length in zip(
            table.document.tolist(), table.start.tolist(), table.length.tolist(), strict=True
        ):
            inputs.update((document, at) for at in range(start, start + length))
    assert set(inputs.values()) == {1} and inputs.total() == 85
    assert [table.start.tolist() for table, _ in found[:2]] == [[0], [10]]
    assert found[3][1].waiting["a"][0].place.start == 20


def test_classes_of_a_resumed_run_may_be_others() -> None:
    """Documents that wait are counted again if new lengths divide them."""
    blocks = [[(11 * number + 5 * block) % 50 + 1 for number in range(9)] for block in range(12)]
    corpora, config = [Memory(blocks, "a")], config_of(60, 60)
    cursor = run(steps_of(corpora, config, mix_of([(1, 10), None], every=9), "drop"), 2)[-1][1]
    (one,) = cursor.waiting["a"]
    steps = steps_of(corpora, config, mix_of([(1, 10), (11, 30), (31, 40), None], every=2), "drop")
    used = Counter[tuple[int, int]]()
    for table, _ in run(steps_of(corpora, config, mix_of([(1, 10), None], every=9), "drop"), 2):
        used.update(zip(table.block.tolist(), table.document.tolist(), strict=True))
    (table, after) = run(steps, 1, cursor)[0]
    assert sum(some.documents for some in after.waiting["a"]) == one.documents - len(table)
    for table, _ in run(steps, 1000, cursor):
        used.update(zip(table.block.tolist(), table.document.tolist(), strict=True))
    assert set(used.values()) == {1} and len(used) == sum(map(len, blocks))
    free = run(steps_of(corpora, config, None, "drop"), 1000, cursor)
    assert not free[-1][1].waiting


def test_a_document_of_no_segment_and_a_segment_without_documents_are_refused() -> None:
    corpus = Memory([[5, 50], [5, 6]], "a")
    with refused(DataError, "memory a"):
        run(steps_of([corpus], config_of(10, 10), mix_of([(1, 9), (1, 40)])), 5)
    with refused(DataError, "memory a"):
        run(steps_of([corpus], config_of(10, 10), mix_of([(10, 40), None])), 5)


def test_a_cursor_without_lengths_is_that_of_earlier_versions() -> None:
    steps = steps_of([Memory([[5, 7, 9]] * 9, "a")], config_of(20, 10))
    for _, cursor in run(steps, 4):
        assert cursor.to_json().keys() == {"step", "tokens", "places", "mixer", "order"} and not cursor.waiting


@pytest.mark.parametrize(
    ("lengths", "inputs", "missing", "drop"),
    [
        ([(1, 500), (600, 20480)], 557, "501 to 599", None),
        ([(600, 900), (1, 500), (700, 2000)], 557, "501 to 599", None),
        ([(8, 500), (600, 900)], 7, "1 to 7", "[{drop: {shorter: 8}}]"),
        ([(8, 500), (600, 900)], 1000, "more than 900", "[{drop: {longer: 900}}]"),
    ],
)
def test_drop_is_advised_only_for_lengths_that_it_can_leave_out(
    lengths: list[tuple[int, int]], inputs: int, missing: str, drop: str | None
) -> None:
    (problem,) = never_taken("web", inputs, "web.jsonl", lengths).problems
    hint = str(problem.hint)
    assert missing in problem.message and f"{inputs:,}" in problem.message
    assert ("drop" in hint) == (drop is not None) and (drop or "") in hint
