from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.load import load
from engine.config.schema import Schedule
from engine.data.draws import Draws
from engine.data.mixture import (
    SCALE,
    Mixer,
    Segment,
    half_cosine,
    longest_document,
    scaled,
    segments_of,
    split,
    weights_at,
)
from engine.units import Ints
from tests.data.one_by_one import SlowMixer
from tests.data.resuming import resumes_exactly

numbers = st.one_of(st.integers(0, 10), st.floats(0, 1e9), st.floats(0, 1e-12))
many_weights = st.lists(numbers, min_size=1, max_size=70).filter(any)
lengths_ = st.lists(st.one_of(st.integers(1, 10), st.just(7), st.integers(1, 2_000_000)), min_size=1, max_size=60)


def named(weights: list[float]) -> dict[str, float]:
    return {f"s{number}": weight for number, weight in enumerate(weights)}


class Mixed:
    """A mixer, and documents that a test takes one at a time."""

    def __init__(self, names: Iterable[str], state: Any | None = None) -> None:
        self.mixer = Mixer(names, state)
        self._draws = Draws(self.mixer, 1 << 62)

    def choose(self) -> str | None:
        """Return the source of the next document."""
        return self._draws.run()

    def take(self, tokens: int) -> str:
        """Take a document of so many tokens; return its source."""
        name = self.choose()
        assert name is not None
        self._draws.give(name, np.array([tokens]))
        self._draws.run()
        return name

    def _by_name(self, column: Ints) -> dict[str, int]:
        return dict(zip(self.mixer.names, column.tolist(), strict=True))

    @property
    def debts(self) -> dict[str, int]:
        return self._by_name(self.mixer.debts)

    @property
    def taken(self) -> dict[str, int]:
        return self._by_name(self.mixer.taken)


def mixed(weights: dict[str, float]) -> Mixed:
    made = Mixed(weights)
    made.mixer.weights = scaled(weights)
    return made


class Exact:
    """The reference: debts as fractions of tokens, and a plain search for the last whole token at which each is due."""

    def __init__(self, names: list[str]) -> None:
        self.debts = {name: Fraction(0) for name in names}
        self.longest = 0

    def choose(self, weights: dict[str, int]) -> str:
        def due(name: str) -> int:
            return math.floor((self.longest - self.debts[name]) / Fraction(weights[name] or 1, SCALE))

        owed = [name for name in self.debts if self.debts[name] >= 0]
        return min(owed, key=lambda name: (due(name), -weights[name], name))

    def took(self, name: str, tokens: int, weights: dict[str, int]) -> None:
        for other, weight in weights.items():
            self.debts[other] += Fraction(weight, SCALE) * tokens
        self.debts[name] -= tokens
        self.longest = max(self.longest, tokens)


@given(many_weights)
def test_weights_are_rounded_to_an_exact_sum(weights: list[float]) -> None:
    given_ = named(weights)
    rounded, total = scaled(given_), sum(map(Fraction, weights))
    assert sum(rounded.values()) == SCALE and list(rounded) == list(given_)
    largest = max(given_, key=given_.__getitem__)
    for name, weight in given_.items():
        exact = Fraction(weight) / total * SCALE
        assert (rounded[name] > 0) == (weight > 0)
        # The largest gives what small weights need to be 1.
        assert abs(rounded[name] - exact) < (len(weights) if given_[name] == given_[largest] else 1)


def test_weights_are_the_same_on_every_machine() -> None:
    assert scaled({"web": 3, "code": 1}) == {"web": 3 << 18, "code": 1 << 18}
    assert scaled({"b": 1, "c": 1, "a": 1}) == {"b": 349525, "c": 349525, "a": 349526}
    assert scaled({"a": 1e9, "b": 1e-300, "c": 0}) == {"a": SCALE - 1, "b": 1, "c": 0}


@given(st.integers(-(10**15), 10**15), st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any))
def test_an_amount_is_split_exactly(amount: int, weights: list[int]) -> None:
    parts = split(amount, {str(number): weight for number, weight in enumerate(weights)})
    assert sum(parts.values()) == amount
    for part, weight in zip(parts.values(), weights, strict=True):
        assert abs(part - Fraction(amount * weight, sum(weights))) < 1


@pytest.mark.parametrize("unit", ["step", "tokens"])
def test_a_segment_lasts_until_the_next(unit: str) -> None:
    a, b, c = ({"x": SCALE - part, "y": part} for part in (0, SCALE // 4, SCALE))
    segments = [Segment(start, weights, unit) for start, weights in ((0, a), (10, b), (11, c))]  # type: ignore[arg-type]

    def at(position: int) -> dict[str, int]:
        return weights_at(segments, *((position, 0) if unit == "step" else (0, position)))

    assert [at(position) for position in (0, 9, 10, 11, 10**9)] == [a, a, b, c, c]


@given(many_weights, st.data(), st.integers(1, 10**12))
def test_weights_move_linearly(weights: list[float], data: st.DataObject, stop: int) -> None:
    before = scaled(named(weights))
    after = scaled(named(data.draw(st.permutations(weights))))
    segments = [Segment(0, before, "tokens"), Segment(stop, after, "tokens", schedule="linear")]
    at = data.draw(st.integers(0, stop))
    found = weights_at(segments, 0, at)
    assert sum(found.values()) == SCALE
    for name, weight in found.items():
        exact = before[name] + Fraction(at, stop) * (after[name] - before[name])
        assert (weight > 0) == (exact > 0) and abs(weight - exact) < len(weights)
    assert weights_at(segments, 0, 0) == before and weights_at(segments, 0, stop + 1) == after


@pytest.mark.parametrize("stop", [1, 2, 3, 7, 10**6, 2**40 + 1])
def test_a_cosine_is_that_of_the_decimal_library(stop: int) -> None:
    """To the last of its 64 bits: the reference has 60 digits, of the series of cos about 0."""
    for at in {0, 1, stop // 3, stop // 2, stop - 1, stop}:
        with localcontext(prec=60):
            angle = Decimal("3.14159265358979323846264338327950288419716939937510582097494459") * at / stop
            term, cosine = Decimal(1), Decimal(0)
            for number in range(0, 100, 2):
                cosine += term
                term = -term * angle * angle / ((number + 1) * (number + 2))
            exact = (1 - cosine) / 2
        found = half_cosine(Fraction(at, stop))
        assert abs(exact * 2**64 - int(found * 2**64)) <= Decimal("0.5000001")
        assert (found * 2**64).denominator == 1 and found + half_cosine(1 - Fraction(at, stop)) == 1


def test_weights_move_along_a_cosine() -> None:
    """These numbers must never change: a run would have other documents."""
    segments = [Segment(0, {"a": SCALE, "b": 0}), Segment(8, {"a": SCALE >> 2, "b": 3 * SCALE >> 2}, schedule="cosine")]
    found = [weights_at(segments, step, 0)["b"] for step in range(10)]
    assert found == [0, 29932, 115170, 242739, 393216, 543693, 671262, 756500, 786432, 786432]
    for step, weight in enumerate(found[:9]):
        assert abs(weight - 0.75 * SCALE * (1 - math.cos(math.pi * step / 8)) / 2) <= 1


def test_segments_of_a_config() -> None:
    sources = ["data=jsonl", "data.sources.web.path=web", "data.sources.code.path=code"]
    later = "{tokens: 4K, weights: {code: 1}, schedule: linear}"
    found = segments_of(load([*sources, f"data.mix=[{{weights: {{web: 3, code: 1}}}}, {later}]"]).data)
    assert found == [
        Segment(0, {"web": 3 << 18, "code": 1 << 18}, "tokens"),
        Segment(4096, {"web": 0, "code": SCALE}, "tokens", schedule="linear"),
    ]
    assert weights_at(found, 7, 2048) == {"web": 3 << 17, "code": 5 << 17}
    assert segments_of(load(sources[:2]).data) == [Segment(0, {"web": SCALE})]
    assert segments_of(load([]).data) == [Segment(0, {"data": SCALE})]


def test_a_segment_after_a_linear_one_starts_from_its_weights() -> None:
    a, b, c = (scaled({"x": x, "y": 4 - x}) for x in (4, 0, 2))
    segments = [Segment(0, a), Segment(4, b, schedule="linear"), Segment(8, b), Segment(10, c, schedule="linear")]
    found = [weights_at(segments, step, 0)["x"] * 4 // SCALE for step in range(13)]
    assert found == [4, 3, 2, 1, 0, 0, 0, 0, 0, 1, 2, 2, 2]


def test_the_example_of_the_docstring() -> None:
    made, found = mixed({"a": 3, "b": 1}), []
    for tokens in (8, 4, 8, 4, 4):
        name = made.take(tokens)
        found.append((name, made.debts["a"] / SCALE, made.debts["b"] / SCALE))
    assert found == [("a", -2, 2), ("b", 1, -1), ("a", -1, 1), ("b", 2, -2), ("a", 1, -1)]


def test_ties_go_to_the_larger_weight_and_then_the_first_name() -> None:
    assert mixed({"b": 1, "c": 2, "a": 1}).choose() == "c"
    assert mixed({"b": 1, "c": 0, "a": 1}).choose() == "a"


@given(many_weights, lengths_)
def test_with_constant_weights_both_bounds_hold_for_any_lengths(weights: list[float], lengths: list[int]) -> None:
    made, own = mixed(named(weights)), dict[str, int]()
    for tokens in lengths:
        name = made.take(tokens)
        assert made.mixer.weights[name] > 0
        own[name] = max(own.get(name, 0), tokens)
        assert sum(made.debts.values()) == 0
        assert all(
            -own.get(other, 0) * SCALE <= debt <= made.mixer.longest * SCALE for other, debt in made.debts.items()
        )


@given(st.lists(st.integers(1, 100), min_size=2, max_size=12), st.integers(1, 5), st.randoms())
def test_documents_of_few_lengths_are_the_hard_case(weights: list[int], step: int, random: random.Random) -> None:
    """With equal documents, serving the largest debt first exceeds the bound for half of all weights of 5 sources."""
    made = mixed(named(list(weights)))
    for _ in range(300):
        made.take(random.choice((1, step, 1000)))
        assert max(made.debts.values()) <= made.mixer.longest * SCALE


def document_lengths(count: int, seed: int) -> Callable[[str], int]:
    """Lengths of random documents of each source; those of s0 are of 2M tokens now and then."""
    draw = random.Random(seed)
    mean = {f"s{number}": draw.uniform(7, 10) for number in range(count)}

    def length(name: str) -> int:
        if name == "s0" and draw.random() < 0.1:
            return 2_000_000
        return max(1, int(draw.lognormvariate(mean[name], 1.2)))

    return length


def three_segments(count: int, seed: int, schedule: Schedule) -> list[Segment]:
    draw = random.Random(seed)
    weights = [
        scaled({f"s{number}": draw.choice((0, 1, draw.expovariate(1))) + (number == 0) for number in range(count)})
        for _ in range(3)
    ]
    return [Segment(0, weights[0]), Segment(60, weights[1], schedule=schedule), Segment(120, weights[2])]


Weights = dict[str, int]


def steps_of(made: Mixed, segments: list[Segment], length: Callable[[str], int]) -> Iterator[tuple[Weights, str, int]]:
    """200 steps of about 1M tokens, as (weights, source, tokens) of each document. They are taken one at a time."""
    for step in range(200):
        weights = weights_at(segments, step, sum(made.taken.values()))
        made.mixer.weights = weights
        tokens = 0
        while tokens < 1_000_000:
            name = made.choose()
            assert name is not None
            taken = length(name)
            made.take(taken)
            tokens += taken
            yield weights, name, taken


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("count", [5, 64])
def test_sources_keep_their_shares_over_three_segments(count: int, schedule: Schedule) -> None:
    segments, names = three_segments(count, count, schedule), [f"s{number}" for number in range(count)]
    made, own = Mixed(names), dict.fromkeys(names, 0)
    wanted = dict.fromkeys(names, 0)  # in 1/SCALE of a token
    for weights, name, tokens in steps_of(made, segments, document_lengths(count, seed=1)):
        for other, weight in weights.items():
            wanted[other] += weight * tokens
        own[name] = max(own[name], tokens)
        longest, debts, taken = max(own.values()) * SCALE, made.debts, made.taken
        for other in names:
            debt = wanted[other] - taken[other] * SCALE
            assert debts[other] == debt
            assert -own[other] * SCALE <= debt <= longest
    assert max(own.values()) == 2_000_000
    assert sum(taken > 0 for taken in made.taken.values()) >= count - 1


@given(st.lists(many_weights, min_size=1, max_size=4), lengths_)
def test_choices_are_those_of_exact_fractions(segments: list[list[float]], lengths: list[int]) -> None:
    count = max(map(len, segments))
    filled = [named(weights + [0.0] * (count - len(weights))) for weights in segments]
    made, reference = Mixed(filled[0]), Exact(list(filled[0]))
    for number, tokens in enumerate(lengths):
        weights = scaled(filled[number * len(filled) // len(lengths)])
        made.mixer.weights = weights
        name = made.take(tokens)
        assert name == reference.choose(weights)
        reference.took(name, tokens, weights)
        assert made.debts == {other: debt * SCALE for other, debt in reference.debts.items()}


def test_a_source_that_lost_its_weight_is_paid_what_it_is_owed() -> None:
    made = mixed({"a": 1, "b": 1, "c": 1})
    made.take(9)  # a; b and c are owed 3 each
    made.mixer.weights = scaled({"a": 1, "b": 1, "c": 0})
    served = [made.take(2) for _ in range(40)]
    assert served.count("c") == 2 and made.debts["c"] < 0


@given(st.lists(many_weights, min_size=2, max_size=3), lengths_, st.data())
def test_a_run_continues_identically_from_any_document(
    segments: list[list[float]], lengths: list[int], data: st.DataObject
) -> None:
    count = max(map(len, segments))
    filled = [scaled(named(weights + [0.0] * (count - len(weights)))) for weights in segments]
    dropped_at, dropped = data.draw(st.integers(0, len(lengths))), data.draw(st.sampled_from(list(filled[0])))

    class Choices:
        """The source of each document, which segments or a dropped source may leave without one."""

        def __init__(self, state: Any | None) -> None:
            self._number, mixer = state or (0, None)
            self._mixed = Mixed(filled[0], mixer)

        def state(self) -> Any:
            return self._number, self._mixed.mixer.state

        def take(self) -> tuple[str | None] | None:
            number, self._number = self._number, self._number + 1
            if number >= len(lengths):
                return None
            self._mixed.mixer.weights = filled[number * len(filled) // len(lengths)]
            if number == dropped_at:
                self._mixed.mixer.drop(dropped)
            name = self._mixed.choose()
            return (name if name is None else self._mixed.take(lengths[number]),)

    assert len(resumes_exactly(Choices, len(lengths) + 1, ahead=5)) == len(lengths)


@given(many_weights.filter(lambda weights: len(weights) > 1), lengths_, st.data())
def test_the_others_take_over_what_a_dropped_source_was_owed(
    weights: list[float], lengths: list[int], data: st.DataObject
) -> None:
    made = mixed(named(weights))
    for tokens in lengths:
        made.take(tokens)
    before, shares, taken = made.debts, made.mixer.weights, made.taken
    name = data.draw(st.sampled_from(list(before)))
    made.mixer.drop(name)
    assert made.debts[name] == 0 and sum(made.debts.values()) == 0 and made.taken == taken
    left = sum(shares.values()) - shares[name]
    if not left:
        assert made.choose() is None
        return
    assert sum(made.mixer.weights.values()) == SCALE and name not in made.mixer.weights
    for other in made.mixer.weights:
        assert abs(made.debts[other] - before[other] - Fraction(before[name] * shares[other], left)) < 1
    for tokens in lengths:
        assert made.take(tokens) != name
    made.mixer.weights = scaled(named(weights))
    assert name not in made.mixer.weights


def test_a_run_may_continue_with_more_sources_but_not_with_fewer() -> None:
    made = mixed({"a": 1, "b": 1})
    assert made.take(10) == "a"
    more = Mixed(["a", "b", "c"], made.mixer.state)
    assert more.debts == {"a": -5 * SCALE, "b": 5 * SCALE, "c": 0} and more.mixer.longest == 10
    with pytest.raises(ValueError, match="not in the mixture: b"):
        Mixer(["a"], made.mixer.state)


def test_the_state_is_small() -> None:
    """A run of 10 trillion tokens with documents of 2M tokens; names of 16 characters."""
    made = mixed({f"source-{number:09}": 1 for number in range(64)})
    for _ in range(1000):
        made.take(2_000_000)
    made.mixer.taken[:] = 10**13
    for name in made.mixer.names[:8]:
        made.mixer.drop(name)
    assert len(json.dumps(made.mixer.state, separators=(",", ":"))) <= 1024 + 64 * 64


def test_64_bits_suffice_for_the_longest_documents() -> None:
    """1,024 sources and documents at the bound: also after changes of weights, and with dropped sources."""
    names, draw = [f"s{number:04}" for number in range(1024)], random.Random(0)
    longest = longest_document(len(names))
    assert longest == 1 << 31
    made, reference = Mixed(names), SlowMixer(names)
    worst = 0
    for favourites in (1024, 1, 3, 1000):
        weights = scaled({name: float(number < favourites) for number, name in enumerate(names)})
        made.mixer.weights = weights
        reference.set(weights)
        for _ in range(100):
            tokens = longest - draw.choice((0, 0, 1))
            name = reference.choose()
            assert name is not None and made.take(tokens) == name
            reference.took(name, tokens)
            worst = max(worst, *map(abs, reference.debts.values()))
        dropped = min(reference.debts, key=reference.debts.__getitem__)
        made.mixer.drop(dropped)
        reference.drop(dropped)
        assert made.mixer.state == reference.state
        names.reverse()
    assert worst > 1 << 50


def test_64_bits_hold_the_largest_debts() -> None:
    """All other sources were served, and one is owed everything: what the note says is the most."""
    names = [f"s{number:04}" for number in range(1024)]
    longest = longest_document(len(names)) * SCALE
    sources = {name: [0, -longest] for name in names[:-1]} | {names[-1]: [0, 1023 * longest]}
    state = {"sources": sources, "dropped": [], "longest": longest // SCALE}
    weights = scaled({name: float(name == names[-1]) for name in names})
    made, reference = Mixed(names, state), SlowMixer(names, state)
    made.mixer.weights = weights
    reference.set(weights)
    for _ in range(1100):
        name = reference.choose()
        assert name is not None and made.take(longest // SCALE) == name
        reference.took(name, longest // SCALE)
    assert made.mixer.state == reference.state
