"""A skyline's runs: neighbouring ranks of one height, speed and memory, and a heap of them by height (skyline.py).

A run on the heap that was joined to another since is not removed: whoever pops it sees that its width is out of date.
Letters: P ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import kernel
from engine.planner.bound import Floats
from engine.planner.plan import Ints

SIZE, _WAITS, ASLEEP = 0, 1, 2  # places of `Sky.counts`


class Ranks(NamedTuple):
    """What rings are placed on. A node's ranks are numbered together."""

    holds: Ints  # [P] tokens that a rank holds
    most: Ints  # [P] tokens of a ring that a rank holds with as much offload as allowed
    slow: Floats  # [P] how many times slower than full speed
    node: int  # ranks of a node
    share: float  # ns of a micro-batch's fixed cost that a token pays; infinite where each ring pays all of it


class Sky(NamedTuple):
    """Runs by their first rank: `width` is 0 where none begins; `begin` by their end; a heap of them by height."""

    height: Floats  # [P]
    width: Ints  # [P]
    begin: Ints  # [P + 1]
    low: Floats  # heap: height
    runs: Ints  # heap: first rank, width
    waiting: Ints  # too narrow for now: first rank, width
    aside: Ints  # first ranks of the runs that a ring has looked at
    counts: Ints  # runs on the heap, runs that wait, and the largest degree for which one of these was too narrow


@kernel
def empty_sky(height: Floats, sequences: int, tries: int) -> Sky:
    """Return a skyline over `height` [P], without runs yet: room for so many rings, each of which looks at a few."""
    count = len(height)
    room = 8 * count + 4 * sequences + 8
    return Sky(
        height,
        np.zeros(count, np.int64),
        np.zeros(count + 1, np.int64),
        np.empty(room),
        np.empty((room, 2), np.int64),
        np.empty((room, 2), np.int64),
        np.empty(tries, np.int64),
        np.zeros(3, np.int64),
    )


@kernel
def all_runs(sky: Sky, ranks: Ranks) -> None:
    """Fill the heap with all runs of one height, speed and memory."""
    sky.width[:] = 0
    sky.counts[SIZE] = sky.counts[_WAITS] = 0
    a = 0
    for rank in range(1, len(sky.height) + 1):
        if rank == len(sky.height) or not _alike(sky, ranks, a, rank, 0.0):
            _set(sky, a, rank - a, sky.height[a])
            push(sky, sky.height[a], a, rank - a)
            a = rank


@kernel
def join(sky: Sky, ranks: Ranks, a: int, near: float) -> tuple[int, int]:
    """Join run `a` with its neighbours of the same kind and nearly the same height; return first rank and width."""
    count = len(sky.height)
    width = sky.width[a]
    while True:
        after = a + width
        if after < count and sky.width[after] > 0 and _alike(sky, ranks, a, after, near):
            other, first = after, a
        elif a > 0 and sky.width[sky.begin[a]] == a - sky.begin[a] and _alike(sky, ranks, a, sky.begin[a], near):
            other = sky.begin[a]
            first = other
        else:
            return a, width
        top = max(sky.height[a], sky.height[other])
        width += sky.width[other]
        sky.width[a] = sky.width[other] = 0
        a = first
        _set(sky, a, width, top)


@kernel
def unite(sky: Sky, first: int, last: int) -> tuple[int, int]:
    """Make all runs from rank `first` to before `last` one, as high as the highest; return first rank and width."""
    height = sky.height[first:last].max()
    sky.width[first:last] = 0
    _set(sky, first, last - first, height)
    return first, last - first


@kernel
def _alike(sky: Sky, ranks: Ranks, a: int, b: int, near: float) -> bool:
    return same_kind(ranks, a, b) and abs(sky.height[a] - sky.height[b]) <= near


@kernel
def same_kind(ranks: Ranks, a: int, b: int) -> bool:
    """Return whether two ranks are of one speed and hold as much."""
    return ranks.slow[a] == ranks.slow[b] and ranks.holds[a] == ranks.holds[b]


@kernel
def _set(sky: Sky, a: int, width: int, height: float) -> None:
    """Make ranks a .. a + width - 1 one run."""
    sky.width[a] = width
    sky.begin[a + width] = a
    for rank in range(a, a + width):
        sky.height[rank] = height


@kernel
def put(sky: Sky, a: int, width: int, free: int, need: int, time: float) -> None:
    """Put a ring on ranks free .. free + need - 1 of a run, which falls into up to three."""
    height = sky.height[a]
    sky.width[a] = 0
    if free > a:
        _set(sky, a, free - a, height)
        push(sky, height, a, free - a)
    _set(sky, free, need, height + time)
    push(sky, height + time, free, need)
    rest = a + width - free - need
    if rest > 0:
        _set(sky, free + need, rest, height)
        push(sky, height, free + need, rest)


@kernel
def wait(sky: Sky, a: int, width: int, need: int) -> None:
    """Put a run aside until degrees are below `need`."""
    sky.waiting[sky.counts[_WAITS], 0], sky.waiting[sky.counts[_WAITS], 1] = a, width
    sky.counts[_WAITS] += 1
    sky.counts[ASLEEP] = max(sky.counts[ASLEEP], need)


@kernel
def awake(sky: Sky, wide: int) -> None:
    """Put waiting runs that are wide enough by now back on the heap."""
    kept = 0
    for w in range(sky.counts[_WAITS]):
        a, width = sky.waiting[w, 0], sky.waiting[w, 1]
        if sky.width[a] != width:
            continue
        if width >= wide:
            push(sky, sky.height[a], a, width)
        else:
            sky.waiting[kept, 0], sky.waiting[kept, 1] = a, width
            kept += 1
    sky.counts[_WAITS], sky.counts[ASLEEP] = kept, wide


@kernel
def _before(low: Floats, runs: Ints, i: int, j: int) -> bool:
    return low[i] < low[j] or (low[i] == low[j] and runs[i, 0] < runs[j, 0])


@kernel
def _swap(low: Floats, runs: Ints, i: int, j: int) -> None:
    low[i], low[j] = low[j], low[i]
    a, width = runs[i, 0], runs[i, 1]
    runs[i, 0], runs[i, 1] = runs[j, 0], runs[j, 1]
    runs[j, 0], runs[j, 1] = a, width


@kernel
def push(sky: Sky, height: float, a: int, width: int) -> None:
    """Put a run on the heap."""
    low, runs, at = sky.low, sky.runs, sky.counts[SIZE]
    low[at], runs[at, 0], runs[at, 1] = height, a, width
    sky.counts[SIZE] += 1
    while at > 0 and _before(low, runs, at, (at - 1) // 2):
        _swap(low, runs, at, (at - 1) // 2)
        at = (at - 1) // 2


@kernel
def pop(sky: Sky) -> None:
    """Take the lowest run, `sky.runs[0]`, from the heap."""
    low, runs, size = sky.low, sky.runs, sky.counts[SIZE] - 1
    sky.counts[SIZE] = size
    _swap(low, runs, 0, size)
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            return
        if child + 1 < size and _before(low, runs, child + 1, child):
            child += 1
        if not _before(low, runs, child, at):
            return
        _swap(low, runs, at, child)
        at = child
