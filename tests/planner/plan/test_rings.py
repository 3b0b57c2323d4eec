from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.plan.rings import folded, least_busy


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 13])
def test_a_rank_has_at_most_four_peers_over_all_rings(ranks: int) -> None:
    peers: dict[int, set[int]] = {rank: set() for rank in range(ranks)}
    for first in range(ranks):
        for degree in range(1, ranks + 1):
            ring = folded(first, degree, ranks).tolist()
            assert sorted(ring) == sorted((first + offset) % ranks for offset in range(degree))
            for rank, following in zip(ring, ring[1:] + ring[:1], strict=True):
                if rank != following:
                    peers[rank].add(following)
                    peers[following].add(rank)
    assert max(map(len, peers.values())) <= 4


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.data())
def test_least_busy_finds_the_ranks_that_can_start_first(load: list[int], data: st.DataObject) -> None:
    degree = data.draw(st.integers(1, len(load)))
    windows = [[load[(first + offset) % len(load)] for offset in range(degree)] for first in range(len(load))]
    best = min(range(len(load)), key=lambda first: (max(windows[first]), -sum(windows[first]), first))
    assert least_busy(np.array(load), degree) == best
