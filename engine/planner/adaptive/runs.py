"""The runs of a skyline (skyline.py), and a heap of them by height.

A run is a row of neighbouring ranks of equal height, speed and capacity. Runs are identified by their first rank. When
runs are joined, their old entries stay on the heap: a popped entry is out of date if its width is not the run's.
Letters: P ranks, R heap entries.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import njit, njit_in_place
from engine.planner.adaptive.workload import Ranks
from engine.units import Floats, Ints

SIZE, WAITING, NEEDED = 0, 1, 2  # indices of `Sky.counts`


class Sky(NamedTuple):
    """A skyline and its runs (`width`, `begin`), in arrays of fixed size that compiled code changes in place."""

    height: Floats  # [P] ns until which each rank is busy
    width: Ints  # [P] width of the run that begins at a rank; 0 if none does
    begin: Ints  # [P + 1] first rank of the run that ends just before a rank
    low: Floats  # [R] heap: height
    runs: Ints  # [R, 2] heap: first rank, width
    waiting: Ints  # [R, 2] runs that are too narrow for the rings so far: first rank, width
    seen: Ints  # first ranks of the runs that the current ring has looked at
    counts: Ints  # [3] runs on the heap, waiting runs, and the largest degree for which one of these was too narrow


@njit
def empty_sky(height: Floats, sequences: int, tries: int) -> Sky:
    """Create a skyline over `height` [P], still without runs; each ring will try up to `tries` runs."""
    count = len(height)
    size = 8 * count + 4 * sequences + 8
    return Sky(
        height,
        np.zeros(count, np.int64),
        np.zeros(count + 1, np.int64),
        np.empty(size),
        np.empty((size, 2), np.int64),
        np.empty((size, 2), np.int64),
        np.empty(tries, np.int64),
        np.zeros(3, np.int64),
    )


@njit_in_place
def same_kind(ranks: Ranks, a: int, b: int) -> bool:
    """Whether ranks `a` and `b` have the same speed and capacity."""
    return ranks.slow[a] == ranks.slow[b] and ranks.holds[a] == ranks.holds[b]


@njit_in_place
def find_runs(sky: Sky, ranks: Ranks) -> None:
    """Find all runs, as wide as possible, and put them on the heap; clears the waiting runs."""
    sky.width[:] = 0
    sky.counts[SIZE] = sky.counts[WAITING] = 0
    a = 0
    for rank in range(1, len(sky.height) + 1):
        if rank == len(sky.height) or not _alike(sky, ranks, a, rank, 0.0):
            _mark(sky, a, rank - a)
            push(sky, sky.height[a], a, rank - a)
            a = rank


@njit_in_place
def join(sky: Sky, ranks: Ranks, a: int, near: float) -> tuple[int, int]:
    """Join run `a` with neighbouring runs of the same speed and capacity whose heights differ by at most `near` ns.

    Returns the first rank and the width of the joined run, which is as high as its highest part.
    """
    count = len(sky.height)
    width = sky.width[a]
    while True:
        # First the run to the right, else the one to the left, until neither is close enough. `begin[a]` may be out of
        # date, so the width of the run there is checked.
        after = a + width
        if after < count and sky.width[after] > 0 and _alike(sky, ranks, a, after, near):
            other, first = after, a
        elif a > 0 and sky.width[sky.begin[a]] == a - sky.begin[a] and _alike(sky, ranks, a, sky.begin[a], near):
            other = sky.begin[a]
            first = other
        else:
            return a, width
        lower, higher = (a, other) if sky.height[a] < sky.height[other] else (other, a)
        if sky.height[lower] < sky.height[higher]:
            sky.height[lower : lower + (width if lower == a else sky.width[other])] = sky.height[higher]
        width += sky.width[other]
        sky.width[a] = sky.width[other] = 0
        a = first
        _mark(sky, a, width)


@njit_in_place
def highest(values: Floats | Ints) -> float:
    """Largest of some values. `values.max()` would allocate, in numba's terms (`njit_in_place`)."""
    found = values[0]
    for at in range(1, len(values)):
        found = max(found, values[at])
    return found


@njit_in_place
def lowest(values: Floats | Ints) -> int:
    """Index of the first smallest of some values."""
    found = 0
    for at in range(1, len(values)):
        if values[at] < values[found]:
            found = at
    return found


@njit_in_place
def unite(sky: Sky, first: int, last: int) -> None:
    """Make ranks first .. last - 1 one run, as high as the highest of them."""
    sky.height[first:last] = highest(sky.height[first:last])
    sky.width[first:last] = 0
    _mark(sky, first, last - first)


@njit_in_place
def _alike(sky: Sky, ranks: Ranks, a: int, b: int, near: float) -> bool:
    """Whether ranks `a` and `b` have the same speed and capacity, and heights at most `near` ns apart."""
    return same_kind(ranks, a, b) and abs(sky.height[a] - sky.height[b]) <= near


@njit_in_place
def _mark(sky: Sky, a: int, width: int) -> None:
    """Make ranks a .. a + width - 1, whose heights are equal, one run."""
    sky.width[a] = width
    sky.begin[a + width] = a


@njit_in_place
def put(sky: Sky, a: int, width: int, first: int, degree: int, time: float) -> None:
    """Put a ring of `time` ns on ranks first .. first + degree - 1 of run `a`, which splits into up to three runs."""
    height = sky.height[a]
    sky.width[a] = 0
    if first > a:
        _mark(sky, a, first - a)
        push(sky, height, a, first - a)
    sky.height[first : first + degree] = height + time
    _mark(sky, first, degree)
    push(sky, height + time, first, degree)
    rest = a + width - first - degree
    if rest > 0:
        _mark(sky, first + degree, rest)
        push(sky, height, first + degree, rest)


@njit_in_place
def wait(sky: Sky, a: int, width: int, need: int) -> None:
    """Set aside run `a`, which is too narrow for a ring of `need` ranks, until `wake`."""
    sky.waiting[sky.counts[WAITING], 0], sky.waiting[sky.counts[WAITING], 1] = a, width
    sky.counts[WAITING] += 1
    sky.counts[NEEDED] = max(sky.counts[NEEDED], need)


@njit_in_place
def wake(sky: Sky, need: int) -> None:
    """Put waiting runs of at least `need` ranks back on the heap; drops runs that are out of date."""
    kept = 0
    for w in range(sky.counts[WAITING]):
        a, width = sky.waiting[w, 0], sky.waiting[w, 1]
        if sky.width[a] != width:
            continue
        if width >= need:
            push(sky, sky.height[a], a, width)
        else:
            sky.waiting[kept, 0], sky.waiting[kept, 1] = a, width
            kept += 1
    sky.counts[WAITING], sky.counts[NEEDED] = kept, need


# A binary heap, ordered by height, then by first rank. It is stored in `Sky`, so a ring allocates no memory.


@njit_in_place
def push(sky: Sky, height: float, a: int, width: int) -> None:
    """Put run `a`, of this height and width, on the heap."""
    low, runs, at = sky.low, sky.runs, sky.counts[SIZE]
    sky.counts[SIZE] += 1
    while at > 0:
        parent = (at - 1) // 2
        if low[parent] < height or (low[parent] == height and runs[parent, 0] <= a):
            break
        low[at], runs[at, 0], runs[at, 1] = low[parent], runs[parent, 0], runs[parent, 1]
        at = parent
    low[at], runs[at, 0], runs[at, 1] = height, a, width


@njit_in_place
def pop(sky: Sky) -> tuple[int, int]:
    """Remove the lowest run from the heap; returns its first rank and its width."""
    low, runs, size = sky.low, sky.runs, sky.counts[SIZE] - 1
    sky.counts[SIZE] = size
    lowest, lowest_width = runs[0, 0], runs[0, 1]
    height, a, width = low[size], runs[size, 0], runs[size, 1]  # the last entry, which moves down from the top
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and (
            low[child + 1] < low[child] or (low[child + 1] == low[child] and runs[child + 1, 0] < runs[child, 0])
        ):
            child += 1
        if height < low[child] or (height == low[child] and a <= runs[child, 0]):
            break
        low[at], runs[at, 0], runs[at, 1] = low[child], runs[child, 0], runs[child, 1]
        at = child
    low[at], runs[at, 0], runs[at, 1] = height, a, width
    return lowest, lowest_width
