from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config.load import load
from engine.config.schema import Schedule
from engine.data.mixture import SCALE, Mixer, Segment, half_cosine, scaled, segments_of, split, weights_at
from tests.data.resuming import resumes_exactly

numbers = st.one_of(st.integers(0, 10), st.floats(0, 1e9), st.floats(0, 1e-12))
many_weights = st.lists(numbers, min_size=1, max_size=70).filter(any)
lengths_ = st.lists(st.one_of(st.integers(1, 10), st.just(7), st.integers(1, 2_000_000)), min_size=1, max_size=60)


def named(weights: list[float]) -> dict[str, float]:
    return {f"s{number}": weight for number, weight in enumerate(weights)}


def mixer(weights: dict[str, float]) -> Mixer:
    made = Mixer(weights)
    made.weights = scaled(weights)
    return made


def chosen(made: Mixer) -> str:
    name = made.choose()
    assert name is not None
    return name


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
    made, found = mixer({"a": 3, "b": 1}), []
    for tokens in (8, 4, 8, 4, 4):
        name = chosen(made)
        made.took(name, tokens)
        found.append((name, made.debts["a"] / SCALE, made.debts["b"] / SCALE))
    assert found == [("a", -2, 2), ("b", 1, -1), ("a", -1, 1), ("b", 2, -2), ("a", 1, -1)]


def test_ties_go_to_the_larger_weight_and_then_the_first_name() -> None:
    assert chosen(mixer({"b": 1, "c": 2, "a": 1})) == "c"
    assert chosen(mixer({"b": 1, "c": 0, "a": 1})) == "a"


@given(many_weights, lengths_)
def test_with_constant_weights_both_bounds_hold_for_any_lengths(weights: list[float], lengths: list[int]) -> None:
    made, own = mixer(named(weights)), dict[str, int]()
    for tokens in lengths:
        name = chosen(made)
        assert made.weights[name] > 0
        made.took(name, tokens)
        own[name] = max(own.get(name, 0), tokens)
        assert sum(made.debts.values()) == 0
        assert all(-own.get(other, 0) * SCALE <= debt <= made.longest * SCALE for other, debt in made.debts.items())


@given(st.lists(st.integers(1, 100), min_size=2, max_size=12), st.integers(1, 5), st.randoms())
def test_documents_of_few_lengths_are_the_hard_case(weights: list[int], step: int, random: random.Random) -> None:
    """With equal documents, serving the largest debt first exceeds the bound for half of all weights of 5 sources."""
    made = mixer(named(list(weights)))
    for _ in range(300):
        made.took(chosen(made), random.choice((1, step, 1000)))
        assert max(made.debts.values()) <= made.longest * SCALE


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


def steps_of(made: Mixer, segments: list[Segment], length: Callable[[str], int]) -> Iterator[tuple[Weights, str, int]]:
    """200 steps of about 1M tokens, as (weights, source, tokens) of each document. They are taken one at a time."""
    for step in range(200):
        weights = weights_at(segments, step, sum(made.taken.values()))
        made.weights = weights
        tokens = 0
        while tokens < 1_000_000:
            name = chosen(made)
            taken = length(name)
            made.took(name, taken)
            tokens += taken
            yield weights, name, taken


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("count", [5, 64])
def test_sources_keep_their_shares_over_three_segments(count: int, schedule: Schedule) -> None:
    segments, names = three_segments(count, count, schedule), [f"s{number}" for number in range(count)]
    made, own = Mixer(names), dict.fromkeys(names, 0)
    wanted = dict.fromkeys(names, 0)  # in 1/SCALE of a token
    for weights, name, tokens in steps_of(made, segments, document_lengths(count, seed=1)):
        for other, weight in weights.items():
            wanted[other] += weight * tokens
        own[name] = max(own[name], tokens)
        longest = max(own.values()) * SCALE
        for other in names:
            debt = wanted[other] - made.taken[other] * SCALE
            assert made.debts[other] == debt
            assert -own[other] * SCALE <= debt <= longest
    assert max(own.values()) == 2_000_000
    assert sum(taken > 0 for taken in made.taken.values()) >= count - 1


@given(st.lists(many_weights, min_size=1, max_size=4), lengths_)
def test_choices_are_those_of_exact_fractions(segments: list[list[float]], lengths: list[int]) -> None:
    count = max(map(len, segments))
    filled = [named(weights + [0.0] * (count - len(weights))) for weights in segments]
    made, reference = Mixer(filled[0]), Exact(list(filled[0]))
    for number, tokens in enumerate(lengths):
        weights = scaled(filled[number * len(filled) // len(lengths)])
        made.weights = weights
        name = chosen(made)
        assert name == reference.choose(weights)
        made.took(name, tokens)
        reference.took(name, tokens, weights)
        assert made.debts == {other: debt * SCALE for other, debt in reference.debts.items()}


def test_a_source_that_lost_its_weight_is_paid_what_it_is_owed() -> None:
    made = mixer({"a": 1, "b": 1, "c": 1})
    made.took(chosen(made), 9)  # a; b and c are owed 3 each
    made.weights = scaled({"a": 1, "b": 1, "c": 0})
    served = []
    for _ in range(40):
        served.append(chosen(made))
        made.took(served[-1], 2)
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
            self._mixer = Mixer(filled[0], mixer)

        def state(self) -> Any:
            return self._number, self._mixer.state

        def take(self) -> tuple[str | None] | None:
            number, self._number = self._number, self._number + 1
            if number >= len(lengths):
                return None
            self._mixer.weights = filled[number * len(filled) // len(lengths)]
            if number == dropped_at:
                self._mixer.drop(dropped)
            name = self._mixer.choose()
            if name is not None:
                self._mixer.took(name, lengths[number])
            return (name,)

    assert len(resumes_exactly(Choices, len(lengths) + 1, ahead=5)) == len(lengths)


@given(many_weights.filter(lambda weights: len(weights) > 1), lengths_, st.data())
def test_the_others_take_over_what_a_dropped_source_was_owed(
    weights: list[float], lengths: list[int], data: st.DataObject
) -> None:
    made = mixer(named(weights))
    for tokens in lengths:
        made.took(chosen(made), tokens)
    before, shares, taken = dict(made.debts), dict(made.weights), dict(made.taken)
    name = data.draw(st.sampled_from(list(before)))
    made.drop(name)
    assert made.debts[name] == 0 and sum(made.debts.values()) == 0 and made.taken == taken
    left = sum(shares.values()) - shares[name]
    if not left:
        assert made.choose() is None
        return
    assert sum(made.weights.values()) == SCALE and name not in made.weights
    for other in made.weights:
        assert abs(made.debts[other] - before[other] - Fraction(before[name] * shares[other], left)) < 1
    for tokens in lengths:
        served = chosen(made)
        assert served != name
        made.took(served, tokens)
    made.weights = scaled(named(weights))
    assert name not in made.weights


def test_a_run_may_continue_with_more_sources_but_not_with_fewer() -> None:
    made = mixer({"a": 1, "b": 1})
    made.took("a", 10)
    more = Mixer(["a", "b", "c"], made.state)
    assert more.debts == {"a": -5 * SCALE, "b": 5 * SCALE, "c": 0} and more.longest == 10
    with pytest.raises(ValueError, match="not in the mixture: b"):
        Mixer(["a"], made.state)


def test_the_state_is_small() -> None:
    """A run of 10 trillion tokens with documents of 2M tokens; names of 16 characters."""
    made = mixer({f"source-{number:09}": 1 for number in range(64)})
    for _ in range(1000):
        made.took(chosen(made), 2_000_000)
    made.taken = dict.fromkeys(made.taken, 10**13)
    for name in list(made.taken)[:8]:
        made.drop(name)
    assert len(json.dumps(made.state, separators=(",", ":"))) <= 1024 + 64 * 64
