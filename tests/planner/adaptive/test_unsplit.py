from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.adaptive.unsplit import deal


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=1, max_size=9),
    st.lists(st.sampled_from([1.0, 2.0]), min_size=9, max_size=9),
    st.lists(st.sampled_from([1.0, 1.5, 2.0, 7.25]), max_size=30),
)
def test_each_sequence_goes_to_the_first_of_the_ranks_that_are_free_first(
    height: list[float], slow: list[float], times: list[float]
) -> None:
    times = sorted(times, reverse=True)
    heap = [(of_rank, rank) for rank, of_rank in enumerate(height)]
    heapify(heap)
    expected = []
    for time in times:
        of_rank, rank = heap[0]
        expected.append(rank)
        heapreplace(heap, (of_rank + time * slow[rank], rank))
    heights = np.array(height)
    assert deal(np.array(times), np.array(slow[: len(height)]), heights).tolist() == expected
    assert heights.tolist() == [of_rank for _, of_rank in sorted((rank, of_rank) for of_rank, rank in heap)]
