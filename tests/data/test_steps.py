from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.schema import Schedule, Segment
from engine.data import draws, order, sequences
from engine.data import steps as module
from engine.data.mixture import SCALE
from engine.data.order import ORDER
from engine.data.sequences import SequenceTable
from engine.data.steps import Cursor, Steps
from engine.data.walk import Place
from engine.errors import DataError
from tests.data.memory import Exhausted, Memory, config_of, epochs, pieces, rows, run, same, steps_of
from tests.data.one_by_one import OneByOne
from tests.data.resuming import StepsFrom, resumes_exactly
from tests.refusals import refused

MIB = 1 << 20
document = st.one_of(st.integers(0, 12), st.integers(0, 60))
blocks_ = st.lists(st.lists(document, max_size=5), min_size=1, max_size=12).filter(lambda b: any(map(any, b)))
sizes = st.integers(1, 80)
longs = st.sampled_from(["step", "split"])
orders = st.sampled_from([1, 2])
Blocks = list[list[int]]


@pytest.fixture(scope="module", autouse=True)
def small_windows() -> Iterator[None]:
    """Windows of 4 blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "WINDOW_BYTES", 4 * MIB)
        yield


def inputs(table: SequenceTable, corpora: Sequence[Memory]) -> Iterator[tuple[int, int, int]]:
    """(source, number of the document, input) of each input of a step."""
    for source, block, document, start, length in rows(table):
        number = corpora[source].number(block, document)
        yield from ((source, number, at) for at in range(start, start + length))


def all_inputs(corpus: Memory, source: int = 0) -> Counter[tuple[int, int, int]]:
    """Every input of a corpus once."""
    lengths = list(chain.from_iterable(corpus.sizes))
    return Counter((source, number, at) for number, length in enumerate(lengths) for at in range(length))


def test_documents_are_split_and_nothing_is_dropped() -> None:
    corpus = Memory([[10], [4]])
    ((table, after),) = run(steps_of([corpus], config_of(14, context=4)), 1)
    ten, four = [(0, 0, 4), (0, 4, 4), (0, 8, 2)], [(1, 0, 4)]
    assert pieces(table, [corpus]) in (ten + four, four + ten)
    assert table.loss_tokens.tolist() == table.length.tolist()
    assert (after.step, after.tokens) == (1, 14)


@given(blocks_, sizes, sizes, st.integers(0, 2**63 - 1), longs, orders)
def test_an_epoch_has_every_input_exactly_once_and_in_order(
    blocks: Blocks, batch: int, context: int, seed: int, long: str, number: int
) -> None:
    """Steps may cross epochs, so the first inputs of the run are the first epoch, and as many are the second."""
    corpus = Memory(blocks)
    steps = steps_of([corpus], config_of(batch, context, seed, long))  # type: ignore[arg-type]
    covered = list(chain.from_iterable(inputs(table, [corpus]) for table, _ in epochs(steps, "data", 2, number)))
    expected = all_inputs(corpus)
    size = expected.total()
    assert Counter(covered[:size]) == Counter(covered[size : 2 * size]) == expected
    assert all(after == (0, before[1], before[2] + 1) or after[2] == 0 for before, after in pairwise(covered))


@given(blocks_, sizes, sizes, st.integers(0, 3))
def test_a_step_is_as_full_as_it_can_be(blocks: Blocks, batch: int, context: int, seed: int) -> None:
    corpus = Memory(blocks)
    lengths = list(chain.from_iterable(blocks))
    for (table, _), (following, _) in pairwise(epochs(steps_of([corpus], config_of(batch, context, seed)), "data", 2)):
        found, tokens = pieces(table, [corpus]), int(table.length.sum())
        assert tokens <= batch or len({number for number, *_ in found}) == 1
        assert tokens + lengths[pieces(following, [corpus])[0][0]] > batch
        assert table.length.max() <= context


@given(blocks_, sizes, st.data(), st.integers(0, 3))
def test_the_pieces_of_long_documents_are_distributed_over_steps(
    blocks: Blocks, batch: int, data: st.DataObject, seed: int
) -> None:
    """With data.long=split no step exceeds batch_tokens, and a piece is left for the next step only if it must be."""
    context = data.draw(st.integers(1, batch))
    corpus = Memory(blocks)
    steps = epochs(steps_of([corpus], config_of(batch, context, seed, "split")), "data", 2)
    for (table, after), (following, _) in pairwise(steps):
        assert table.length.max() <= context and table.length.sum() <= batch
        place, (_, block, document, start, _) = after.places["data"], rows(following)[0]
        left = blocks[block][document] - start
        assert table.length.sum() + (min(left, context) if left > batch else left) > batch
        assert place.start == start
        assert not start or rows(following)[0][:3] == rows(table)[-1][:3], "it goes on with the same document"


def test_a_split_document_goes_on_in_the_next_step() -> None:
    """Whole sequences of the context, until the rest fits a step."""
    corpus = Memory([[25]])
    found = run(steps_of([corpus], config_of(10, context=4, long="split")), 3)
    assert [table.start.tolist() for table, _ in found] == [[0, 4], [8, 12], [16, 20, 24]]
    assert [after.places["data"] for _, after in found][:2] == [Place(0, 0, 0, 8), Place(0, 0, 0, 16)]


@given(blocks_, blocks_, sizes, sizes, longs, st.sampled_from(["repeat", "drop", "stop"]), st.integers(1, 5), orders)
@settings(max_examples=35)
def test_a_run_continues_identically_from_any_saved_cursor(
    first: Blocks, second: Blocks, batch: int, context: int, long: str, exhausted: str, seed: int, number: int
) -> None:
    begin = Cursor(order=number).to_json()
    corpora = [Memory(first, "a"), Memory(second, "b")]
    config, mix = config_of(batch, context, seed, long), {"a": 2, "b": 1}  # type: ignore[arg-type]
    resumes_exactly(lambda state: StepsFrom(steps_of(corpora, config, mix, exhausted), state or begin), most=12)  # type: ignore[arg-type]


def test_the_state_is_small() -> None:
    """64 sources far into a run: at most 1 KB and 64 bytes a source, without its name."""
    corpora = [Memory([[7] * 50] * 20, f"s{number:02}") for number in range(64)]
    cursor = run(steps_of(corpora, config_of(2000, 100)), 4)[-1][1]
    far = {name: Place(12, 34_567, 8_901, 0) for name in cursor.places}
    state = json.dumps(Cursor(10**6, 10**13, far, cursor.mixer).to_json(), separators=(",", ":"))
    names = 2 * 64 * 3
    assert len(far) == 64 and len(state) - names <= 1024 + 64 * 64


def test_a_longer_document_is_a_step_by_itself() -> None:
    corpus = Memory([[3, 50, 3]])
    steps = steps_of([corpus], config_of(10, 100))
    found = [{number for number, *_ in pieces(table, [corpus])} for table, _ in run(steps, 3)]
    assert {1} in found


def test_the_rest_of_an_epoch_joins_the_next() -> None:
    corpus = Memory([[4, 4, 4]])
    ((table, cursor),) = run(steps_of([corpus], config_of(16, context=8)), 1)
    assert table.length.sum() == 16
    assert sorted(number for number, *_ in pieces(table, [corpus])[:3]) == [0, 1, 2]
    assert cursor.places == {"data": Place(1, 0, 1)}


@given(blocks_, st.sets(st.integers(0, 60)), sizes, longs)
def test_validation_documents_are_never_trained_on(blocks: Blocks, held: set[int], batch: int, long: str) -> None:
    corpus = Memory(blocks, validation=sorted(held))
    lengths = list(chain.from_iterable(blocks))
    expected = {number for number, length in enumerate(lengths) if length} - held
    steps = steps_of([corpus], config_of(batch, 5, long=long, validation_tokens=10_000))  # type: ignore[arg-type]
    validated = {n for table in steps.validation(ORDER).values() for n, *_ in pieces(table, [corpus])}
    assert validated == {number for number in held if number < len(lengths) and lengths[number]}
    if not expected:
        with pytest.raises(DataError) as caught:
            steps.next(Cursor())
        problem = caught.value.problems[0]
        if any(lengths):
            assert "is used for validation, none for training" in problem.message
            assert problem.key == "data.validation_share"
        else:
            message = f"every document ({len(lengths)}) is empty" if lengths else "contains no documents"
            assert (problem.message, problem.key) == (message, corpus.place)
        return
    trained = {n for table, _ in epochs(steps, "data", 2) for n, *_ in pieces(table, [corpus])}
    assert trained == expected


def test_the_order_depends_on_seed_source_and_epoch_only() -> None:
    def order_of(seed: int, epoch: int, name: str = "data", batch: int = 250) -> list[int]:
        corpus = Memory([[5] * 25] * 2, name)
        at = Cursor(places={name: Place(epoch)})
        ((table, _),) = run(steps_of([corpus], config_of(batch, 5, seed)), 1, at)
        return [number for number, *_ in pieces(table, [corpus])]

    assert order_of(0, 0) == order_of(0, 0) and sorted(order_of(0, 0)) == list(range(50))
    assert order_of(0, 0, batch=100) == order_of(0, 0)[:20]
    orders = {tuple(order_of(seed, epoch)) for seed in (0, 1, 2**63 - 1) for epoch in range(3)}
    assert len(orders | {tuple(order_of(0, 0, "other"))}) == 10


@pytest.mark.parametrize(("number", "expected"), [(1, [0, 4, 6, 2, 5, 7, 3, 1]), (2, [2, 0, 3, 1, 7, 5, 6, 4])])
def test_the_order_of_a_seed_is_the_same_on_every_machine(number: int, expected: list[int]) -> None:
    """A run that resumes with another numpy must see the documents in the same order."""
    corpus = Memory([[1] * 4, [1] * 4])
    ((table, _),) = run(steps_of([corpus], config_of(8, 1, seed=7)), 1, Cursor(order=number))
    assert [number for number, *_ in pieces(table, [corpus])] == expected


@pytest.mark.parametrize("saved", [1, 2])
def test_a_run_keeps_the_number_of_its_order(saved: int) -> None:
    """Checkpoints of the first order have no number."""
    corpora = [Memory([[3, 5] * 4] * 30, name, validation=range(0, 200, 3)) for name in "ab"]
    steps = steps_of(corpora, config_of(40, 4, validation_tokens=50))
    found = run(steps, 12, Cursor(order=saved))
    assert {cursor.order for _, cursor in found} == {saved}
    state = found[3][1].to_json()
    assert state["order"] == saved
    if saved == 1:
        del state["order"]
    resumed = Cursor.of_json(json.loads(json.dumps(state)))
    again = run(steps_of(corpora, config_of(40, 4)), 8, resumed)
    assert all(same(one, other) for (one, _), (other, _) in zip(again, found[4:], strict=True))
    other = run(steps, 12, Cursor(order=3 - saved))
    assert not all(same(one, two) for (one, _), (two, _) in zip(found, other, strict=True))
    sets = [steps.validation(number)["a"] for number in (saved, saved, 3 - saved)]
    assert same(sets[0], sets[1]) and not same(sets[0], sets[2])


@pytest.mark.parametrize("tokens", [0, 1, 4, 9, 12, 13, 99])
def test_the_validation_set_is_as_large_as_fits(tokens: int) -> None:
    """Shuffled: in the order of names, a small set would be one or two documents."""
    corpus = Memory([[7, 10, 7, 3]], validation=[1, 3])
    found = steps_of([corpus], config_of(9, context=4, validation_tokens=tokens)).validation(ORDER)
    shuffled = [(1, 4, 4), (1, 0, 4), (1, 8, 2), (3, 0, 3)]
    total, expected = 0, []
    for piece in shuffled:
        total += piece[2]
        if total <= tokens or not expected:
            expected.append(piece)
        else:
            break
    assert [pieces(table, [corpus]) for table in found.values()] == ([expected] if tokens else [])


def test_without_validation_documents_there_is_no_set() -> None:
    assert steps_of([Memory([[7, 10]])], config_of(9, 4, validation_tokens=100)).validation(ORDER) == {}


def test_a_small_validation_set_is_of_many_documents() -> None:
    """Of the first windows, until they have four times the inputs: 8 blocks of 5 documents of 100 inputs."""
    for number in (1, 2):
        corpus = Memory([[100] * 10] * 100, validation=range(0, 1000, 2))
        (table,) = steps_of([corpus], config_of(9, 50, validation_tokens=1000)).validation(number).values()
        assert table.length.sum() == 1000 and len({number for number, *_ in pieces(table, [corpus])}) > 12
        assert len({*corpus.opened}) == 8


@pytest.mark.parametrize(("number", "blocks"), [(1, 16 * 4), (2, 1 + 1 + 2 + 13 * 4)])
def test_few_validation_documents_are_looked_for_in_a_part_of_a_large_source(number: int, blocks: int) -> None:
    corpus = Memory([[100] * 10] * 100, validation=[0])
    steps_of([corpus], config_of(9, 50, validation_tokens=1000)).validation(number)
    assert len({*corpus.opened}) == blocks


def test_labels_that_are_masked_are_no_loss_tokens() -> None:
    """The label of an input is the next token, and the test's masks count tokens of odd numbers."""
    corpus = Memory([[7, 4]], masked=[0], validation=[])
    ((table, _),) = run(steps_of([corpus], config_of(11, context=5)), 1)
    by_piece = dict(zip(pieces(table, [corpus]), table.loss_tokens.tolist(), strict=True))
    assert by_piece == {(0, 0, 5): 3, (0, 5, 2): 1, (1, 0, 4): 4}


# Several sources


@given(blocks_, blocks_, st.integers(0, 9), st.integers(1, 9), sizes, longs)
@settings(max_examples=35)
def test_each_source_gives_every_document_once_in_an_epoch_of_its_own(
    first: Blocks, second: Blocks, one: int, other: int, batch: int, long: str
) -> None:
    corpora = [Memory(first, "a"), Memory(second, "b")]
    config = config_of(batch, 20, long=long)  # type: ignore[arg-type]
    found = run(steps_of(corpora, config, {"a": one, "b": other}), 30)
    taken = [step for table, _ in found for step in inputs(table, corpora)]
    for source, corpus in enumerate(corpora):
        expected, ours = all_inputs(corpus, source), [step for step in taken if step[0] == source]
        size = expected.total()
        for begin in range(0, len(ours) - size + 1, size):
            assert Counter(ours[begin : begin + size]) == expected
    had = {name: counts[0] for name, counts in (found[-1][1].mixer or {})["sources"].items()}
    assert had == {name: sum(s == number for s, *_ in taken) for number, name in enumerate("ab")}
    assert found[-1][1].tokens == len(taken)


def test_sources_get_their_shares_of_tokens() -> None:
    random = np.random.default_rng(0)
    corpora = [Memory([random.integers(1, 90, 40).tolist() for _ in range(30)], name) for name in "abc"]
    steps, cursor = steps_of(corpora, config_of(1000, 100), {"a": 5, "b": 4, "c": 1}), Cursor()
    for table, after in run(steps, 60):
        cursor = after
        assert 900 < table.length.sum() <= 1000
    assert cursor.mixer is not None
    for name, share in (("a", 0.5), ("b", 0.4), ("c", 0.1)):
        had, debt = cursor.mixer["sources"][name]
        assert had + debt / SCALE == pytest.approx(share * cursor.tokens, abs=2)
        assert abs(debt / SCALE) <= 90


def of_source(found: list[tuple[SequenceTable, Cursor]], source: int) -> list[tuple[int, ...]]:
    """(block, document, start, length) of each sequence of a source in all steps."""
    return [row[1:] for table, _ in found for row in rows(table) if row[0] == source]


@given(st.integers(1, 20), longs)
@settings(max_examples=20)
def test_new_weights_leave_no_gap_and_repeat_nothing(at: int, long: str) -> None:
    """On resume, sources may get other weights, appear, go and come back. The order within a source stays the same."""
    random = np.random.default_rng(at)
    a, b, c = (Memory([random.integers(1, 90, 9).tolist() for _ in range(11)], name) for name in "abc")
    config = config_of(200, 20, long=long)  # type: ignore[arg-type]
    parts = list[tuple[list[Memory], list[tuple[SequenceTable, Cursor]]]]()
    cursor = Cursor()
    for corpora, mix in (([a, b], {"a": 1, "b": 1}), ([a, c], {"a": 1, "c": 8}), ([c, b, a], {"b": 1, "a": 2, "c": 0})):
        found = run(steps_of(corpora, config, mix), at, cursor)
        parts.append((corpora, found))
        cursor = found[-1][1]
    assert cursor.step == 3 * at
    for corpus, trained in ((a, (True, True, True)), (b, (True, False, True)), (c, (False, True, True))):
        taken = [of_source(found, corpora.index(corpus)) if corpus in corpora else [] for corpora, found in parts]
        assert all(bool(part) <= expected for part, expected in zip(taken, trained, strict=True))
        assert at < 3 or all(map(bool, taken[:2])) or not all(trained[:2])
        alone = of_source(run(steps_of([corpus], config), 3 * at), 0)
        inputs_ = [[(b, d, at) for b, d, s, n in some for at in range(s, s + n)] for some in (chain(*taken), alone)]
        assert inputs_[0] == inputs_[1][: len(inputs_[0])]
    assert at < 3 or of_source(parts[2][1], 1), "a source that comes back is trained on"


def test_segments_change_the_weights_of_a_run() -> None:
    corpora = [Memory([[10] * 20] * 8, name) for name in "ab"]
    mix = [Segment(weights={"a": 1, "b": 0}), Segment(step=3, weights={"b": 1})]
    found = run(steps_of(corpora, config_of(100, 10), mix), 6)
    assert [{source for source, *_ in rows(table)} for table, _ in found] == [{0}] * 3 + [{1}] * 3


def test_a_source_that_is_not_in_the_mixture_is_for_validation() -> None:
    corpora = [Memory([[9] * 10], "a", validation=[1, 2]), Memory([[9] * 10], "b"), Memory([[4] * 10], "c", share=1.0)]
    steps = steps_of(corpora, config_of(40, 9, validation_tokens=60), {"a": 1, "b": 2})
    sets = steps.validation(ORDER)
    assert sets.keys() == {"a", "c"}, "no document of b is held out"
    assert {n for n, *_ in pieces(sets["a"], corpora)} == {1, 2}
    assert sets["c"].length.sum() == 20, "the sources divide the inputs"
    assert {source for table, _ in run(steps, 20) for source, *_ in rows(table)} == {0, 1}


def test_a_source_without_a_share_takes_nothing_of_the_validation_set() -> None:
    corpora = [Memory([[9] * 10], "a", share=0.0), Memory([[4] * 10], "c", share=1.0)]
    sets = steps_of(corpora, config_of(40, 9, validation_tokens=40), {"a": 1}).validation(ORDER)
    assert list(sets) == ["c"] and sets["c"].length.sum() == 40


# Sources that are used up


@given(blocks_, blocks_, sizes, longs)
def test_a_dropped_source_has_given_every_document_once(first: Blocks, second: Blocks, batch: int, long: str) -> None:
    """The run ends when all have been dropped; nothing is left over."""
    corpora = [Memory(first, "a"), Memory(second, "b")]
    config = config_of(batch, 20, long=long)  # type: ignore[arg-type]
    found = run(steps_of(corpora, config, {"a": 3, "b": 1}, "drop"), 10_000)
    taken = Counter(chain.from_iterable(inputs(table, corpora) for table, _ in found))
    assert taken == all_inputs(corpora[0], 0) + all_inputs(corpora[1], 1)
    assert all(len(table) for table, _ in found)
    steps = steps_of(corpora, config, {"a": 3, "b": 1}, "drop")
    *before, end = (steps.ended(cursor) for cursor in (Cursor(), *(after for _, after in found)))
    assert before == [None] * len(found)
    assert end == (
        "all documents of a, b were used; "
        "set data.sources.a.exhausted=repeat data.sources.b.exhausted=repeat to use them again"
    )


@given(blocks_, blocks_, sizes, longs)
def test_a_run_stops_with_the_first_source_that_is_used_up(
    first: Blocks, second: Blocks, batch: int, long: str
) -> None:
    """The others repeat until then; what was taken for the last step is trained on."""
    corpora = [Memory(first, "a"), Memory(second, "b")]
    config = config_of(batch, 20, long=long)  # type: ignore[arg-type]
    steps = steps_of(corpora, config, {"a": 3, "b": 1}, {"a": "stop", "b": "repeat"})
    found = run(steps, 10_000)
    taken = Counter(chain.from_iterable(inputs(table, corpora) for table, _ in found))
    assert Counter({key: count for key, count in taken.items() if key[0] == 0}) == all_inputs(corpora[0])
    assert all(cursor.places["a"].epoch == 0 for _, cursor in found)
    assert steps.next(found[-1][1]) is None
    *before, end = (steps.ended(cursor) for cursor in (Cursor(), *(after for _, after in found)))
    assert before == [None] * len(found)
    assert end == "all documents of a were used; set data.sources.a.exhausted=repeat to use them again"


def test_a_source_is_dropped_once_and_for_all() -> None:
    """Also with weights of a later segment, until the user says repeat."""
    corpora = [Memory([[10] * 3], "a"), Memory([[10] * 50], "b")]
    mix = [Segment(weights={"a": 1, "b": 1}), Segment(step=4, weights={"a": 9, "b": 1})]
    config, policies = config_of(40, 10), dict[str, Exhausted](a="drop", b="repeat")
    found = run(steps_of(corpora, config, mix, policies), 8)
    cursor = found[-1][1]
    assert cursor.mixer is not None and cursor.mixer["dropped"] == ["a"]
    assert sum(row[0] == 0 for table, _ in found for row in rows(table)) == 3
    assert all(table.length.sum() == 40 for table, _ in found)
    resumed = run(steps_of(corpora, config, mix), 3, cursor)
    assert any(row[0] == 0 for table, _ in resumed for row in rows(table))


@pytest.mark.parametrize("unit", ["step", "tokens"])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_segment_whose_sources_were_dropped_ends_the_run(unit: str, schedule: Schedule) -> None:
    """Even if a later one has others. The sentence says what to write to go on, and that is so."""
    corpora, config = [Memory([[10] * 12], name) for name in "abc"], config_of(40, 10)
    middle = {"step": 2} if unit == "step" else {"tokens": 80}
    end = {"step": 50} if unit == "step" else {"tokens": 2000}
    mix = [
        Segment(weights={"a": 1, "b": 0, "c": 0}),
        Segment(weights={"a": 1, "b": 1, "c": 0}, **middle),  # type: ignore[arg-type]
        Segment(weights={"a": 1, "b": 1, "c": 1}, **end, schedule=schedule),  # type: ignore[arg-type]
    ]
    policies: dict[str, Exhausted] = {"a": "drop", "b": "drop", "c": "repeat"}
    steps = steps_of(corpora, config, mix, policies)
    found = run(steps, 40)
    if schedule != "constant":  # c has a weight right away
        assert len(found) == 40 and steps.ended(found[-1][1]) is None
        return
    cursor = found[-1][1]
    assert len(found) == 6 and cursor.tokens == 240
    start = "step 2" if unit == "step" else "token 80"
    assert steps.ended(cursor) == (
        f"all documents of a, b were used, and the segment of data.mix from {start} on has no other source; give c a "
        "weight there to continue, or set data.sources.a.exhausted=repeat data.sources.b.exhausted=repeat"
    )
    weighted = [mix[0], Segment(weights={"a": 1, "b": 1, "c": 1}, **middle), mix[2]]  # type: ignore[arg-type]
    for changed in (
        steps_of(corpora, config, weighted, policies),
        steps_of(corpora, config, mix, dict.fromkeys("abc", "repeat")),  # type: ignore[arg-type]
    ):
        assert changed.ended(cursor) is None and len(run(changed, 5, cursor)) == 5


def test_nothing_is_opened_to_see_that_sources_which_repeat_do_not_end() -> None:
    corpus = Memory([[10] * 3], "a")
    assert steps_of([corpus], config_of(40, 10)).ended(Cursor()) is None and not corpus.opened


@pytest.mark.parametrize("exhausted", ["repeat", "drop", "stop"])
@pytest.mark.parametrize("share", [0.0, 0.25])
@pytest.mark.parametrize(
    ("blocks", "value"),
    [
        ([[0, 0], [0]], "(3)"),
        ([[], []], ""),
        ([], ""),
    ],
)
def test_only_empty_documents_are_refused(blocks: Blocks, value: str, share: float, exhausted: str) -> None:
    corpora = [Memory([[5]], "a"), Memory(blocks, "b", share=share)]
    steps = steps_of(corpora, config_of(20, 5), exhausted=exhausted)
    with refused(DataError, "memory b") as problems:
        run(steps, 3)
    assert value in problems[0].message


# What is packed ahead


@given(blocks_, blocks_, sizes, st.integers(0, 12), st.sampled_from(["repeat", "drop"]))
def test_blocks_are_said_before_they_are_opened(
    first: Blocks, second: Blocks, batch: int, skipped: int, exhausted: str
) -> None:
    corpora = [Memory(first, "a"), Memory(second, "b")]
    config = config_of(batch, 20)
    cursor = [Cursor(), *(after for _, after in run(steps_of(corpora, config, exhausted=exhausted), skipped))][-1]
    steps = steps_of(corpora, config, exhausted=exhausted)
    for corpus in corpora:
        corpus.opened.clear()
    said = list(steps.upcoming(cursor, 1))
    assert not any(corpus.opened for corpus in corpora)
    if steps.next(cursor) is None:
        return
    for corpus in corpora:  # the first that a step opens are those of the window that it is in
        opened = [block for name, block in said if name == corpus.name]
        assert not corpus.opened or corpus.opened[0] == opened[0]


def test_blocks_are_said_for_as_many_bytes_as_are_wanted() -> None:
    """In the order in which they are needed; sources alternate by windows."""
    corpora = [Memory([[5]] * 40, "a"), Memory([[5]] * 6, "b")]
    steps = steps_of(corpora, config_of(20, 5))
    said = list(steps.upcoming(Cursor(order=2), 10 * MIB))  # a token is a byte
    assert [name for name, _ in said] == ["a", "b"] * 2 + ["a"] * 2 + ["b"] * 2 + ["a"] * 4 + ["b"] * 2
    few = [name for name, _ in steps.upcoming(Cursor(), 10 * MIB)]
    assert few == ["a"] * 4 + ["b"] * 4 + ["a"] * 4 + ["b"] * 2
    assert sorted(block for name, block in said if name == "b") == list(range(6)), "it has no more"
    run(steps, 3, Cursor(order=2))
    opened = list(dict.fromkeys(corpora[0].opened))
    assert opened == [block for name, block in said if name == "a"][: len(opened)]


@pytest.mark.parametrize(("few", "number"), [(20 * MIB, 1), (20 * MIB - 1, 2)])
def test_a_new_run_has_small_windows_only_if_documents_are_many(
    few: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are packed at the start if they are few. A run keeps its number when that changes."""
    monkeypatch.setattr(order, "FEW_BYTES", few)
    corpora = [Memory([[5, 5]] * 12, "a", validation=range(0, 24, 2)), Memory([[5, 5]] * 8, "b", validation=range(8))]
    steps, config = steps_of(corpora, config_of(20, 5)), config_of(20, 5, validation_tokens=20)
    assert [after.order for _, after in run(steps, 3)] == [number] * 3
    for kept in (1, 2):
        assert [after.order for _, after in run(steps, 3, Cursor(order=kept))] == [kept] * 3
    of_new, of_number = (steps_of(corpora, config).validation(one) for one in (Cursor().order, number))
    assert of_new.keys() == {"a", "b"} and all(rows(of_new[name]) == rows(of_number[name]) for name in "ab")
    assert [*steps.upcoming(Cursor(), 9 * MIB)] == [*steps.upcoming(Cursor(order=number), 9 * MIB)]


def test_how_much_of_a_window_is_used_is_known_of_the_last_windows_alone() -> None:
    steps, cursor, used = steps_of([Memory([[5] * 4] * 60, "a")], config_of(15, 5)), Cursor(), Counter[bool]()
    for _ in range(300):
        found = steps.next(cursor)
        assert found is not None
        place = (cursor := found[1]).places["a"]
        window = next(iter(steps.windows_ahead(cursor)))
        used[0 < window.used < 1] += 1
        assert not place.document or window.used == place.document / (4 * len(window.blocks))
    assert cursor.places["a"].epoch == 3 and used[True] > 200 and len(steps._documents["a"]) == 16


@pytest.mark.parametrize("blocks", [[], [[0]], [[5]] * 3])
def test_a_tiny_source_is_said_once(blocks: Blocks) -> None:
    """However much is wanted: its blocks are there then."""
    steps = steps_of([Memory(blocks, bytes_=0), Memory([[5]] * 3, "b")], config_of(20, 5))
    said = Counter(islice(steps.upcoming(Cursor(), 1 << 60), 100))
    assert said == Counter([("data", block) for block in range(len(blocks))] + [("b", block) for block in range(3)])


def test_blocks_of_a_source_for_validation_are_not_said() -> None:
    """Its documents are needed once, in the order of `validating`."""
    corpora = [Memory([[5]] * 9, "a"), Memory([[5]] * 9, "b", share=1.0), Memory([[5]] * 9, "c")]
    steps = steps_of(corpora, config_of(20, 5), [Segment(weights={"a": 1}), Segment(step=7, weights={"c": 1})])
    assert {name for name, _ in steps.upcoming(Cursor(), MIB)} == {"a", "c"}


def test_blocks_of_the_validation_set_are_said() -> None:
    corpora = [Memory([[5]] * 10, "a", share=0.0), Memory([[5]] * 10, "b", validation=range(10))]
    steps = steps_of(corpora, config_of(20, 5, validation_tokens=5))
    said = list(steps.validating(ORDER))
    assert len(said) == 1 and {name for name, _ in said} == {"b"}
    steps.validation(ORDER)
    assert [("b", corpora[1].opened[0])] == said and len(list(steps.validating(1))) == 4
    assert list(steps_of(corpora, config_of(20, 5)).validating(ORDER)) == []


def test_windows_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one window open its blocks once for the order; loss tokens are looked up besides."""
    monkeypatch.setattr(sequences, "_loss_tokens", lambda corpora, table: table.length)
    corpora = [Memory([[5] * 10] * 4, "a"), Memory([[5] * 10] * 4, "b")]
    run(steps_of(corpora, config_of(20, 5)), 15)
    assert [Counter(corpus.opened) for corpus in corpora] == [Counter(range(4))] * 2
    assert module._WINDOWS >= 2


def test_a_kept_window_has_four_numbers_of_8_bytes_for_each_document() -> None:
    """A window of 16 MiB may have 160,000 documents, and two are kept for each source."""
    corpus = Memory([[5] * 40_000], share=0.0)
    steps = steps_of([corpus], config_of(20, 5))
    tracemalloc.start()
    try:
        assert steps.next(Cursor()) is not None
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 4 * 8 * 40_000 <= held < 4 * 8 * 40_000 + 100_000


# Documents one by one


@given(st.data())
@settings(max_examples=60)
def test_steps_are_those_of_a_loop_over_documents(data: st.DataObject) -> None:
    """Tables, cursors and ends, for any lengths, weights, segments and policies, resumed at every step."""
    names = [f"s{number}" for number in range(data.draw(st.integers(1, 4)))]
    corpora = [
        Memory(data.draw(blocks_), name, masked=data.draw(st.sets(st.integers(0, 20))), validation=[3], share=0.0)
        for name in names
    ]
    context = data.draw(sizes)
    config = config_of(data.draw(sizes), context, data.draw(st.integers(0, 9)), data.draw(longs))
    policies = {name: data.draw(st.sampled_from(["repeat", "drop", "stop"])) for name in names}
    weights = st.fixed_dictionaries({name: st.integers(0, 5) for name in names}).filter(lambda one: any(one.values()))
    starts = sorted(data.draw(st.sets(st.integers(1, 12), max_size=2)))
    schedules = st.sampled_from(["constant", "linear", "cosine"])
    mix = [
        Segment(step=start, weights=data.draw(weights), schedule=data.draw(schedules) if start else "constant")
        for start in (0, *starts)
    ]
    reference, cursor = steps_of(corpora, config, mix, policies, OneByOne), Cursor(order=data.draw(orders))
    assert isinstance(reference, OneByOne)
    steps = steps_of(corpora, config, mix, policies)
    for _ in range(15):
        expected = reference.next(cursor)
        resumed = steps_of(corpora, config, mix, policies)
        for one in (steps, resumed):
            assert (one.ended(cursor) is not None) == (expected is None) == reference.has_ended(cursor)
            found = one.next(cursor)
            assert (found is None) == (expected is None)
            if found and expected:
                assert same(found[0], expected[0])
                assert json.dumps(found[1].to_json()) == json.dumps(expected[1].to_json())
        if expected is None:
            break
        cursor = Cursor.of_json(json.loads(json.dumps(expected[1].to_json())))


@pytest.mark.parametrize("long", ["step", "split"])
def test_many_documents_are_drawn_as_in_a_loop(long: Literal["step", "split"], monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a queue and than the memory for parts at first; sources come, go and are used up."""
    monkeypatch.setattr(draws, "_PARTS", 16)
    random = np.random.default_rng(0)
    corpora = [
        Memory([random.integers(0, 40, 300).tolist() for _ in range(8)], name, share=0.0, masked=range(0, 2400, 70))
        for name in "abcd"
    ]
    mix = [Segment(weights={"a": 5, "b": 3, "c": 1, "d": 0}), Segment(step=2, weights={"a": 1, "b": 1, "c": 1, "d": 4})]
    policies: dict[str, Exhausted] = {"a": "repeat", "b": "drop", "c": "repeat", "d": "drop"}
    config, cursor = config_of(35_000, 32, long=long), Cursor(order=2)
    steps, reference = (steps_of(corpora, config, mix, policies, kind) for kind in (Steps, OneByOne))
    for _ in range(5):
        found, expected = steps.next(cursor), reference.next(cursor)
        assert found is not None and expected is not None
        assert same(found[0], expected[0]) and found[1] == expected[1]
        cursor = found[1]
    assert cursor.mixer is not None and cursor.mixer["dropped"]


def test_a_document_that_is_too_long_for_the_mixture_is_refused() -> None:
    corpora = [Memory([[1 << 40]], "a", share=0.0), Memory([[5]], "b", share=0.0)]
    steps = steps_of(corpora, config_of(20, 1 << 38))
    assert (step := steps.next(Cursor())) is not None and step[0].length.sum() == 1 << 40
    corpora = [Memory([[(1 << 40) + 1]], "a", share=0.0), Memory([[5]], "b", share=0.0)]
    with refused(DataError, "memory a"):
        steps_of(corpora, config_of(20, 1 << 38)).next(Cursor())
    config = config_of(20, 10, long="split")
    assert (step := steps_of(corpora, config).next(Cursor())) is not None and step[0].length.sum() <= 20
