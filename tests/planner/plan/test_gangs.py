from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.plan.gangs import components
from tests.planner.samples import ints


def by_flooding(rings: list[list[int]], micro_batches: int) -> list[int]:
    """Propagate the smallest label through rings until nothing changes."""
    label = list(range(micro_batches))
    for _ in range(micro_batches):
        for ring in rings:
            smallest = min(label[micro] for micro in ring)
            for micro in ring:
                label[micro] = smallest
    return label


@given(st.integers(1, 30), st.data())
def test_components_are_those_of_flooding(micro_batches: int, data: st.DataObject) -> None:
    member = st.integers(0, micro_batches - 1)
    rings = data.draw(st.lists(st.lists(member, min_size=1, max_size=4), min_size=1, max_size=30))
    start = np.cumsum([0, *map(len, rings)])
    found = components(ints(*(micro for ring in rings for micro in ring)), start, micro_batches)
    assert found.tolist() == by_flooding(rings, micro_batches)


def test_a_long_chain_of_rings_is_one_gang() -> None:
    order = np.random.default_rng(0).permutation(3000)
    links = np.stack([order[:-1], order[1:]], axis=1).ravel()
    assert not components(links, np.arange(0, 6000, 2)[: 2999 + 1], 3000).any()
