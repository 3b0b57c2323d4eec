from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.planner.baselines.pack import best_fit


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(50, 80))
def test_every_item_is_in_one_bin_and_no_bin_overflows(sizes: list[int], capacity: int) -> None:
    bins = best_fit(sizes, capacity)
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    assert all(items and sum(sizes[item] for item in items) <= capacity for items in bins)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_two_bins_never_fit_in_one(sizes: list[int]) -> None:
    filled = sorted(sum(sizes[item] for item in items) for items in best_fit(sizes, 50))
    assert len(filled) == 1 or filled[0] + filled[1] > 50
