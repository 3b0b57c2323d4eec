from __future__ import annotations

from itertools import combinations, permutations, product

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks import optimum

pytestmark = pytest.mark.long


def by_hand(times: NDArray[np.float64], floors: list[int], ranks: int) -> float:
    """Least makespan, by brute force."""
    sets = [chosen for size in range(1, ranks + 1) for chosen in combinations(range(ranks), size)]
    best = np.inf
    for rings in product(sets, repeat=len(times)):
        if any(len(ring) < floor for ring, floor in zip(rings, floors, strict=True)):
            continue
        for order in permutations(range(len(times))):
            height = np.zeros(ranks)
            for at in order:
                height[list(rings[at])] = height[list(rings[at])].max() + times[at, len(rings[at])]
            best = min(best, height.max())
    return float(best)


def test_the_optimum_is_that_of_every_choice() -> None:
    random = np.random.default_rng(0)
    times = np.concatenate([np.full((3, 1), np.inf), random.uniform(1, 5, (3, 3)) / np.sqrt([1, 2, 3])], axis=1)
    floors = random.integers(1, 4, 3)
    assert optimum.optimum(times, floors, 3) == pytest.approx(by_hand(times, floors.tolist(), 3))


def test_ours_is_near_the_optimum() -> None:
    """It may be slightly below 1: a micro-batch may hold several sequences, unlike the optimum's gangs."""
    assert 0.95 < optimum.ratio(3, 4, seed=0) < 1.1
