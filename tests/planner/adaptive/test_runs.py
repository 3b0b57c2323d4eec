from __future__ import annotations

import numpy as np

from engine.planner.adaptive.runs import SIZE, Sky, empty_sky, find_runs, join, pop, put, wait, wake
from engine.planner.adaptive.workload import Ranks

RANKS = Ranks(np.full(8, 16), np.full(8, 16), np.array([1.0] * 6 + [2.0] * 2), 8, 0.0)


def sky_of(*height: float) -> Sky:
    """A skyline with all its runs on the heap."""
    sky = empty_sky(np.array(height), 4, 8)
    find_runs(sky, RANKS)
    return sky


def popped(sky: Sky) -> list[tuple[int, int]]:
    return [pop(sky) for _ in range(int(sky.counts[SIZE]))]


def test_the_lowest_run_comes_first_and_of_equal_ones_that_of_the_first_rank() -> None:
    assert popped(sky_of(3.0, 3.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0)) == [(2, 2), (5, 1), (6, 2), (4, 1), (0, 2)]


def test_runs_of_nearly_one_height_and_one_kind_are_joined() -> None:
    sky = sky_of(1.0, 1.0, 1.2, 1.4, 5.0, 5.0, 1.0, 1.0)
    assert join(sky, RANKS, 2, 0.5) == (0, 4)
    assert sky.height.tolist() == [1.4] * 4 + [5.0, 5.0, 1.0, 1.0]
    assert join(sky, RANKS, 6, 9.0) == (6, 2)  # its neighbours are faster


def test_a_ring_splits_its_run() -> None:
    sky = sky_of(*[1.0] * 8)
    put(sky, *pop(sky), 1, 3, 4.0)
    assert sky.height.tolist() == [1.0, 5.0, 5.0, 5.0, 1.0, 1.0, 1.0, 1.0]
    assert popped(sky) == [(0, 1), (4, 2), (6, 2), (1, 3)]


def test_a_run_that_is_too_narrow_waits_until_rings_need_fewer_ranks() -> None:
    sky = sky_of(*[1.0] * 6, 2.0, 3.0)
    wait(sky, *pop(sky), 7)
    wake(sky, 7)
    assert popped(sky) == [(6, 1), (7, 1)]
    wake(sky, 6)
    assert popped(sky) == [(0, 6)]
    assert sky.width.tolist() == [6, 0, 0, 0, 0, 0, 1, 1]
