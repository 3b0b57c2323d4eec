"""Rings on ranks without a gap: a skyline of equal heights.

A rank's height is the time until which it is busy. Longest sequences first, each ring goes on the lowest run of
neighbouring ranks of one height that is wide enough, so that all its members are free at once and none waits:

```
 height |         [ring 3   ]             runs: 0-3 (height 0: too narrow, waits), 4-9 (rings 1 and 3), 10-15
        | [ring 1   ][ring 2     ]        the next ring goes on ring 2; one of 4 ranks, later, on ranks 0-3
        +-----------------------------
```
- A run that is too narrow waits until degrees shrink.
- Where a ring would leave a remnant, neighbouring runs of nearly one height are joined first (`join`).
- A ring may take some more ranks than it needs where that uses up a run exactly (`stretch`).
- Inside a node a ring does not cross the node's border. Runs end where speed or memory changes.
Letters: S sequences in descending order, P ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from engine.cost.times import Rates
from engine.planner.bound import Floats, fastest, least_degree, ring_time
from engine.planner.plan import Ints

_SPARE = 4  # ranks that a ring takes at most beside those that it needs, to use up a run


class Ranks(NamedTuple):
    """What rings are placed on. A node's ranks are numbered together."""

    holds: Ints  # [P] tokens that a rank holds
    most: Ints  # [P] tokens of a ring that a rank holds with as much offload as allowed
    slow: Floats  # [P] how many times slower than full speed
    node: int  # ranks of a node
    share: float  # ns of a micro-batch's fixed cost that a token pays


class Rule(NamedTuple):
    """What a candidate tries. ns."""

    limit: float  # no ring takes longer, if some degree keeps it
    join: float  # runs whose heights differ by less are joined
    stretch: float  # how many times more ranks than needed a ring takes where that uses up a run
    tries: int  # runs that a ring looks at for one on which it stays below `top`
    gap: float  # where a ring would rise above `top` its members may wait this long for each other
    top: float  # where a ring would rise above it, it takes up to twice the ranks


class Rings(NamedTuple):
    """Where each sequence lies: [S], filled for those that are placed."""

    degree: Ints
    first: Ints
    start: Floats


class _Sky(NamedTuple):
    """Runs by their first rank: `width` is 0 where none begins; `begin` by their end; a heap of them by height."""

    height: Floats  # [P]
    width: Ints  # [P]
    begin: Ints  # [P + 1]
    low: Floats  # heap: height
    runs: Ints  # heap: first rank, width
    waiting: Ints  # too narrow for now: first rank, width


@njit(cache=True)
def place_rings(
    rates: Rates, lengths: Ints, gain: Floats, ranks: Ranks, rule: Rule, rings: Rings, height: Floats
) -> int:
    """Place all sequences that need two ranks or more; return how many: they come first. Raises `height` [P].

    With offload a rank holds `gain` [S] times as many tokens of a sequence.
    """
    count = len(height)
    room = 8 * count + 4 * len(lengths) + 8
    sky = _Sky(
        height,
        np.zeros(count, np.int64),
        np.zeros(count + 1, np.int64),
        np.empty(room),
        np.empty((room, 2), np.int64),
        np.empty((room, 2), np.int64),
    )
    size, waits = _all_runs(sky, ranks), 0
    aside = np.empty(rule.tries, np.int64)
    asleep = 0  # the largest degree for which a run was too narrow since all that are wide enough were put back
    quick, small = _best_rank(ranks), int(np.argmin(ranks.holds))
    slowest = ranks.slow.max()
    for at in range(len(lengths)):
        tokens = float(lengths[at])
        if (
            lengths[at] <= ranks.holds[small]
            and ring_time(rates, tokens, 1, ranks.node, ranks.share) * slowest <= rule.limit
        ):
            return at
        wide = _needed(
            rates, tokens, _floor(ranks, quick, tokens, gain[at]), count, ranks, rule.limit / ranks.slow[quick]
        )
        if wide < asleep:
            size, waits = _awake(sky, size, waits, wide)
            asleep = wide
        placed, tried = False, 0
        best, best_need, best_stop = -1, 0, np.inf
        while size > 0 and tried < rule.tries:
            a, width = sky.runs[0, 0], sky.runs[0, 1]
            size = _pop(sky.low, sky.runs, size)
            if sky.width[a] != width:
                continue  # it was joined to another
            need = wide
            if not _same_kind(ranks, a, quick):
                need = _needed(
                    rates, tokens, _floor(ranks, a, tokens, gain[at]), count, ranks, rule.limit / ranks.slow[a]
                )
            room = (rule.top - sky.height[a]) / ranks.slow[a]
            wider = _widened(rates, tokens, need, count, ranks, room)
            if width % need != 0 or wider > width:
                a, width = _join(sky, ranks, a, rule.join)
            free = _aligned(a, need, ranks.node)
            if free + need > a + width:
                sky.waiting[waits, 0], sky.waiting[waits, 1] = a, width
                waits += 1
                asleep = max(asleep, need)
                continue
            if wider <= width and _aligned(a, wider, ranks.node) == a:
                need = wider
            stop = sky.height[a] + ring_time(rates, tokens, need, ranks.node, ranks.share) * ranks.slow[a]
            aside[tried] = a
            tried += 1
            if stop < best_stop:
                best, best_need, best_stop = a, need, stop
            if stop <= rule.top:
                break
        for other in aside[:tried]:
            if other != best and sky.width[other] > 0:
                size = _push(sky.low, sky.runs, size, sky.height[other], other, sky.width[other])
        if best >= 0:
            a, width, need = best, sky.width[best], best_need
            if best_stop > rule.top and rule.gap > 0.0:
                first, last, need = _spread(rates, tokens, sky, ranks, a, need, rule.gap, rule.top)
                if last - first > width:
                    a, width = _unite(sky, first, last)
            free = _aligned(a, need, ranks.node)
            rest = a + width - free
            if need < rest <= min(rule.stretch * need, need + _SPARE) and _aligned(free, rest, ranks.node) == free:
                need = rest
            time = ring_time(rates, tokens, need, ranks.node, ranks.share) * ranks.slow[a]
            size = _put(sky, size, a, width, free, need, time)
            rings.degree[at], rings.first[at], rings.start[at] = need, free, sky.height[free] - time
            placed = True
        if not placed:  # no run is wide enough: over ranks of several heights or kinds, some of which wait
            need = _needed(rates, tokens, _floor(ranks, small, tokens, gain[at]), count, ranks, rule.limit / slowest)
            a = _lowest(height, need)
            begin = height[a : a + need].max()
            time = ring_time(rates, tokens, need, ranks.node, ranks.share) * ranks.slow[a : a + need].max()
            height[a : a + need] = begin + time
            rings.degree[at], rings.first[at], rings.start[at] = need, a, begin
            size, waits = _all_runs(sky, ranks), 0
    return len(lengths)


@njit(cache=True)
def _needed(rates: Rates, tokens: float, least: int, most: int, ranks: Ranks, limit: float) -> int:
    """Return the least degree that keeps the limit; where none does, the fastest."""
    least = min(max(1, least), most)
    found = least_degree(rates, tokens, least, most, ranks.node, ranks.share, limit)
    if found:
        return found
    best = (
        fastest(rates, tokens, least, min(ranks.node, most), ranks.node, ranks.share) if least < ranks.node else least
    )
    if most > ranks.node:
        beyond = fastest(rates, tokens, max(least, ranks.node + 1), most, ranks.node, ranks.share)
        if ring_time(rates, tokens, beyond, ranks.node, ranks.share) < ring_time(
            rates, tokens, best, ranks.node, ranks.share
        ):
            return beyond
    return best


@njit(cache=True)
def _widened(rates: Rates, tokens: float, need: int, most: int, ranks: Ranks, room: float) -> int:
    """Return the least degree with which a ring fits the time that is left, if up to twice `need` does, else `need`."""
    if ring_time(rates, tokens, need, ranks.node, ranks.share) <= room:
        return need
    wider = least_degree(rates, tokens, need, min(2 * need, most), ranks.node, ranks.share, room)
    return wider if wider else need


@njit(cache=True)
def _aligned(a: int, need: int, node: int) -> int:
    """Return the first rank from `a` on at which a ring does not cross a node's border, if it fits in a node at all."""
    return (a // node + 1) * node if need <= node < a % node + need else a


@njit(cache=True)
def _join(sky: _Sky, ranks: Ranks, a: int, near: float) -> tuple[int, int]:
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


@njit(cache=True)
def _spread(
    rates: Rates, tokens: float, sky: _Sky, ranks: Ranks, a: int, need: int, gap: float, stop: float
) -> tuple[int, int, int]:
    """Return the first rank, the end and the degree of a ring that reaches over higher neighbours of its run.

    Its members wait up to `gap` for each other; it only does so where it is done by `stop`.
    """
    count = len(sky.height)
    first, last, most = a, a + sky.width[a], 2 * need
    height = sky.height[a]
    for _ in range(8):
        left = sky.begin[first] if first > 0 and _same_kind(ranks, a, first - 1) else -1
        right = last if last < count and _same_kind(ranks, a, last) else -1
        if left < 0 and right < 0:
            break
        if right < 0 or (left >= 0 and sky.height[left] <= sky.height[right]):
            height = max(height, sky.height[left])
            first = left
        else:
            height = max(height, sky.height[right])
            last += sky.width[right]
        if height > sky.height[a] + gap:
            break
        degree = min(last - first, most)
        if _aligned(first, degree, ranks.node) != first:
            continue
        found = height + ring_time(rates, tokens, degree, ranks.node, ranks.share) * ranks.slow[a]
        if found <= stop:
            return first, last, degree
    return a, a + sky.width[a], need


@njit(cache=True)
def _unite(sky: _Sky, first: int, last: int) -> tuple[int, int]:
    """Make all runs from rank `first` to before `last` one, as high as the highest; return first rank and width."""
    height = sky.height[first:last].max()
    sky.width[first:last] = 0
    _set(sky, first, last - first, height)
    return first, last - first


@njit(cache=True)
def _alike(sky: _Sky, ranks: Ranks, a: int, b: int, near: float) -> bool:
    return _same_kind(ranks, a, b) and abs(sky.height[a] - sky.height[b]) <= near


@njit(cache=True)
def _same_kind(ranks: Ranks, a: int, b: int) -> bool:
    return ranks.slow[a] == ranks.slow[b] and ranks.holds[a] == ranks.holds[b]


@njit(cache=True)
def _best_rank(ranks: Ranks) -> int:
    """Return the first of the fastest ranks, the largest of these."""
    best = 0
    for rank in range(1, len(ranks.slow)):
        if ranks.slow[rank] < ranks.slow[best] or (
            ranks.slow[rank] == ranks.slow[best] and ranks.holds[rank] > ranks.holds[best]
        ):
            best = rank
    return best


@njit(cache=True)
def _floor(ranks: Ranks, a: int, tokens: float, gain: float) -> int:
    """Return the least degree that holds a sequence on ranks like `a`."""
    holds = max(ranks.holds[a], min(ranks.most[a], int(ranks.holds[a] * gain)))
    return int(-(-tokens // holds))


@njit(cache=True)
def _set(sky: _Sky, a: int, width: int, height: float) -> None:
    """Make ranks a .. a + width - 1 one run."""
    sky.width[a] = width
    sky.begin[a + width] = a
    for rank in range(a, a + width):
        sky.height[rank] = height


@njit(cache=True)
def _put(sky: _Sky, size: int, a: int, width: int, free: int, need: int, time: float) -> int:
    """Put a ring on ranks free .. free + need - 1 of a run; return the heap's size with what the run falls into."""
    height = sky.height[a]
    sky.width[a] = 0
    if free > a:
        _set(sky, a, free - a, height)
        size = _push(sky.low, sky.runs, size, height, a, free - a)
    _set(sky, free, need, height + time)
    size = _push(sky.low, sky.runs, size, height + time, free, need)
    rest = a + width - free - need
    if rest > 0:
        _set(sky, free + need, rest, height)
        size = _push(sky.low, sky.runs, size, height, free + need, rest)
    return size


@njit(cache=True)
def _awake(sky: _Sky, size: int, waits: int, wide: int) -> tuple[int, int]:
    """Put waiting runs that are wide enough by now back on the heap; return the sizes of both."""
    kept = 0
    for w in range(waits):
        a, width = sky.waiting[w, 0], sky.waiting[w, 1]
        if sky.width[a] != width:
            continue
        if width >= wide:
            size = _push(sky.low, sky.runs, size, sky.height[a], a, width)
        else:
            sky.waiting[kept, 0], sky.waiting[kept, 1] = a, width
            kept += 1
    return size, kept


@njit(cache=True)
def _all_runs(sky: _Sky, ranks: Ranks) -> int:
    """Fill the heap with all runs of one height, speed and memory; return its size."""
    sky.width[:] = 0
    size, a = 0, 0
    for rank in range(1, len(sky.height) + 1):
        if rank == len(sky.height) or not _alike(sky, ranks, a, rank, 0.0):
            _set(sky, a, rank - a, sky.height[a])
            size = _push(sky.low, sky.runs, size, sky.height[a], a, rank - a)
            a = rank
    return size


@njit(cache=True)
def _lowest(height: Floats, width: int) -> int:
    """Return the first rank of the window whose highest rank is the lowest."""
    best, lowest = 0, np.inf
    for a in range(len(height) - width + 1):
        top = height[a : a + width].max()
        if top < lowest:
            best, lowest = a, top
    return best


@njit(cache=True)
def _before(low: Floats, runs: Ints, i: int, j: int) -> bool:
    return low[i] < low[j] or (low[i] == low[j] and runs[i, 0] < runs[j, 0])


@njit(cache=True)
def _swap(low: Floats, runs: Ints, i: int, j: int) -> None:
    low[i], low[j] = low[j], low[i]
    a, width = runs[i, 0], runs[i, 1]
    runs[i, 0], runs[i, 1] = runs[j, 0], runs[j, 1]
    runs[j, 0], runs[j, 1] = a, width


@njit(cache=True)
def _push(low: Floats, runs: Ints, size: int, height: float, a: int, width: int) -> int:
    low[size], runs[size, 0], runs[size, 1] = height, a, width
    at = size
    while at > 0 and _before(low, runs, at, (at - 1) // 2):
        _swap(low, runs, at, (at - 1) // 2)
        at = (at - 1) // 2
    return size + 1


@njit(cache=True)
def _pop(low: Floats, runs: Ints, size: int) -> int:
    size -= 1
    _swap(low, runs, 0, size)
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            return size
        if child + 1 < size and _before(low, runs, child + 1, child):
            child += 1
        if not _before(low, runs, child, at):
            return size
        _swap(low, runs, at, child)
        at = child
