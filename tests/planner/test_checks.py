"""The compiled loops of `verify` against the plainest way to say the same."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.planner import checks
from tests.planner.samples import ints

ROWS = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=8)
PAIRS = st.integers(1, 8).flatmap(
    lambda size: st.lists(st.tuples(*[st.integers(0, size - 1)] * 2), min_size=size, max_size=size)
)


def first(wrong: list[bool]) -> int:
    return wrong.index(True) if True in wrong else -1


def flat(rows: list[list[int]]) -> list[int]:
    return [value for row in rows for value in row]


def starts(rows: list[list[int]]) -> np.ndarray:
    return np.cumsum([0, *map(len, rows)])


@given(st.integers(1, 8).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=size, max_size=size)))
def test_a_shard_that_is_not_once(order: list[int]) -> None:
    again = [value in order[:place] for place, value in enumerate(order)]
    assert checks.not_once(ints(*order)) == (order[first(again)] if any(again) else -1)


@given(ROWS)
def test_what_is_twice_in_a_row(rows: list[list[int]]) -> None:
    again = flat([[value in row[:place] for place, value in enumerate(row)] for row in rows])
    assert checks.twice_in_row(starts(rows), ints(*flat(rows)), 5) == first(again)


@given(PAIRS)
def test_gangs_of_several_values(pairs: list[tuple[int, int]]) -> None:
    gang, other = (ints(*row) for row in zip(*pairs, strict=True))
    several = [any(a == g and b != o for a, b in pairs[:place]) for place, (g, o) in enumerate(pairs)]
    assert checks.mixed_gang(gang, other) == first(several)
    assert checks.other_gang(gang, other) == first([gang[place] != gang[o] for place, o in enumerate(other)])


@given(ROWS)
def test_slots_out_of_order(rows: list[list[int]]) -> None:
    wrong = flat([[value != place for place, value in enumerate(row)] for row in rows])
    assert checks.out_of_order(ints(*flat(rows)), starts(rows)) == first(wrong)
