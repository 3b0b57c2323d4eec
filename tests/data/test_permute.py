from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.permute import Permutation


def order(count: int, key: str = "") -> list[int]:
    return Permutation(count, key)(np.arange(count)).tolist()


@given(st.integers(1, 3000), st.text(max_size=5))
def test_every_item_has_one_position(count: int, key: str) -> None:
    assert sorted(order(count, key)) == list(range(count))


@given(st.lists(st.integers(0, 10**12 - 1), max_size=20))
def test_positions_are_looked_up_one_by_one(positions: list[int]) -> None:
    """Any subset, in any order, of more items than a table could hold."""
    permutation = Permutation(10**12, "key")
    together = permutation(np.array(positions, dtype=np.int64)).tolist()
    assert together == [int(permutation(np.array([position]))[0]) for position in positions]
    assert len(set(together)) == len(set(positions)) and all(0 <= item < 10**12 for item in together)


def test_no_item_is_no_order() -> None:
    assert Permutation(7, "key")(np.empty(0, dtype=np.int64)).tolist() == []


@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_orders_of_few_items_are_about_equally_likely(count: int) -> None:
    found, draws = dict.fromkeys(permutations(range(count)), 0), 3_000
    for key in range(draws):
        found[tuple(order(count, str(key)))] += 1
    mean = draws / len(found)
    spread = sum((seen - mean) ** 2 / mean for seen in found.values())  # chi-square with len(found) - 1 degrees
    assert spread < len(found) - 1 + 5 * np.sqrt(2 * len(found)), found


def test_neighbours_are_far_from_each_other() -> None:
    """As far as in a random order, where the mean distance is a third of the count."""
    distances = np.abs(np.diff(order(100_000)))
    assert distances.mean() == pytest.approx(100_000 / 3, rel=0.02)
    assert (distances < 100).mean() < 0.004


def test_the_order_of_a_key_is_the_same_on_every_machine() -> None:
    """A run that resumes elsewhere must see the documents in the same order."""
    assert order(8, "7 0") == [6, 5, 0, 1, 7, 3, 4, 2]
    large = Permutation(10**9, "key")(np.array([0, 1, 10**9 - 1]))
    assert large.tolist() == [190901317, 496008199, 39031214]
