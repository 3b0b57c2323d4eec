from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.plan.rows import ascending, first_out_of_range, first_short_row, grouped, hops, row_of_each
from tests.planner.samples import ints


@given(st.lists(st.integers(0, 9), max_size=40))
def test_grouping_is_a_stable_sort(keys: list[int]) -> None:
    start, items = grouped(ints(*keys), 10)
    assert items.tolist() == np.argsort(keys, kind="stable").tolist()
    assert np.diff(start).tolist() == np.bincount(keys, minlength=10).tolist() and start[0] == 0
    assert row_of_each(start).tolist() == sorted(keys)


@given(st.lists(st.integers(-3, 12), max_size=10), st.integers(0, 2), st.integers(0, 12))
def test_the_first_short_row_is_found(rest: list[int], least: int, end: int) -> None:
    start = [0, *rest]
    short = [row for row in range(len(rest)) if start[row + 1] - start[row] < least or start[row + 1] > end]
    assert first_short_row(ints(*start), end, least) == (short[0] if short else -1)


@given(st.lists(st.integers(-3, 12), max_size=10), st.integers(-2, 2), st.integers(3, 12))
def test_the_first_value_out_of_range_is_found(values: list[int], low: int, high: int) -> None:
    out = [place for place, value in enumerate(values) if not low <= value < high]
    assert first_out_of_range(ints(*values), low, high) == (out[0] if out else -1)


_KEYS = st.one_of(st.integers(-3, 3), st.integers(-(2**40), 2**40), st.integers(-(2**61), 2**61))


@given(st.lists(_KEYS, max_size=40), st.sampled_from([1, 40]))
def test_keys_are_sorted_in_a_stable_way(keys: list[int], times: int) -> None:
    """Digits are larger for more than 1,024 keys."""
    many = ints(*keys * times)
    assert ascending(many).tolist() == np.argsort(many, kind="stable").tolist()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=9))
def test_hops_stay_in_their_row(rows: list[tuple[int, int]]) -> None:
    start = np.cumsum([0, *(size for size, _ in rows)])
    found = hops(start, ints(*(steps for _, steps in rows)))
    expected = [
        first + (at + steps) % size for first, (size, steps) in zip(start, rows, strict=False) for at in range(size)
    ]
    assert found.tolist() == expected
