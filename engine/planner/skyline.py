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

from engine.compiled import kernel
from engine.cost.times import Rates
from engine.planner.bound import Floats, fastest, least_degree, ring_time
from engine.planner.plan import Ints
from engine.planner.sky import (
    ASLEEP,
    SIZE,
    Ranks,
    Sky,
    all_runs,
    awake,
    empty_sky,
    join,
    pop,
    push,
    put,
    same_kind,
    unite,
    wait,
)

_SPARE = 4  # ranks that a ring takes at most beside those that it needs, to use up a run


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


@kernel
def place_rings(
    rates: Rates, lengths: Ints, gain: Floats, ranks: Ranks, rule: Rule, rings: Rings, height: Floats
) -> int:
    """Place all sequences that need two ranks or more; return how many: they come first. Raises `height` [P].

    With offload a rank holds `gain` [S] times as many tokens of a sequence.
    """
    sky = empty_sky(height, len(lengths), rule.tries)
    all_runs(sky, ranks)
    quick, small, slowest = _best_rank(ranks), int(np.argmin(ranks.holds)), ranks.slow.max()
    alike = ranks.slow.min() == slowest and ranks.holds.max() == ranks.holds[small]
    for at in range(len(lengths)):
        tokens = float(lengths[at])
        whole = ring_time(rates, tokens, 1, ranks.node, ranks.share) * slowest
        if lengths[at] <= ranks.holds[small] and whole <= rule.limit:
            return at
        wide = _of_kind(rates, tokens, gain[at], quick, ranks.slow[quick], ranks, rule)
        if wide < sky.counts[ASLEEP]:
            awake(sky, wide)
        run, need, stop = _choose(rates, tokens, gain[at], wide, quick, sky, ranks, rule)
        if run >= 0 and (alike or stop <= rule.top):
            placed = _on_run(rates, tokens, run, need, stop, sky, ranks, rule)
        else:
            over = _of_kind(rates, tokens, gain[at], small, slowest, ranks, rule)
            first, begin, end = _window(rates, tokens, over, sky.height, ranks)
            if run >= 0 and stop <= end:
                placed = _on_run(rates, tokens, run, need, stop, sky, ranks, rule)
            else:
                placed = _over_all(first, over, begin, end, sky, ranks)
        rings.first[at], rings.degree[at], rings.start[at] = placed
    return len(lengths)


@kernel
def _choose(
    rates: Rates, tokens: float, gain: float, wide: int, quick: int, sky: Sky, ranks: Ranks, rule: Rule
) -> tuple[int, int, float]:
    """Return the run on which a ring is done first, of the few lowest that are wide enough, its degree and its stop.

    The first one on which it stays below `rule.top` is taken; -1 if no run is wide enough. Runs that are too narrow go
    to those that wait.
    """
    tried, best, best_need, best_stop = 0, -1, 0, np.inf
    while sky.counts[SIZE] > 0 and tried < rule.tries:
        a, width = sky.runs[0, 0], sky.runs[0, 1]
        pop(sky)
        if sky.width[a] != width:
            continue  # it was joined to another
        need = wide if same_kind(ranks, a, quick) else _of_kind(rates, tokens, gain, a, ranks.slow[a], ranks, rule)
        wider = _widened(rates, tokens, need, len(sky.height), ranks, (rule.top - sky.height[a]) / ranks.slow[a])
        if width % need != 0 or wider > width:
            a, width = join(sky, ranks, a, rule.join)
        if _aligned(a, need, ranks.node) + need > a + width:
            wait(sky, a, width, need)
            continue
        if wider <= width and _aligned(a, wider, ranks.node) == a:
            need = wider
        stop = sky.height[a] + ring_time(rates, tokens, need, ranks.node, ranks.share) * ranks.slow[a]
        sky.aside[tried] = a
        tried += 1
        if stop < best_stop:
            best, best_need, best_stop = a, need, stop
        if stop <= rule.top:
            break
    for other in sky.aside[:tried]:
        if other != best and sky.width[other] > 0:
            push(sky, sky.height[other], other, sky.width[other])
    return best, best_need, best_stop


@kernel
def _of_kind(rates: Rates, tokens: float, gain: float, like: int, slow: float, ranks: Ranks, rule: Rule) -> int:
    """Return the degree that a sequence needs on ranks that hold as many tokens as `like` and are so slow."""
    return _needed(rates, tokens, _floor(ranks, like, tokens, gain), len(ranks.slow), ranks, rule.limit / slow)


@kernel
def _on_run(
    rates: Rates, tokens: float, a: int, need: int, stop: float, sky: Sky, ranks: Ranks, rule: Rule
) -> tuple[int, int, float]:
    """Put a ring on a run; return its first rank, its degree and when it begins."""
    width = sky.width[a]
    if stop > rule.top and rule.gap > 0.0:
        first, last, need = _spread(rates, tokens, sky, ranks, a, need, rule.gap, rule.top)
        if last - first > width:
            a, width = unite(sky, first, last)
    free = _aligned(a, need, ranks.node)
    rest = a + width - free
    if need < rest <= min(rule.stretch * need, need + _SPARE) and _aligned(free, rest, ranks.node) == free:
        need = rest
    time = ring_time(rates, tokens, need, ranks.node, ranks.share) * ranks.slow[a]
    put(sky, a, width, free, need, time)
    return free, need, sky.height[free] - time


@kernel
def _window(rates: Rates, tokens: float, need: int, height: Floats, ranks: Ranks) -> tuple[int, float, float]:
    """Return the first of the neighbours, of any heights and kinds, that are free the earliest, begin and end."""
    a = _lowest(height, need)
    begin = height[a : a + need].max()
    time = ring_time(rates, tokens, need, ranks.node, ranks.share) * ranks.slow[a : a + need].max()
    return a, begin, begin + time


@kernel
def _over_all(a: int, need: int, begin: float, end: float, sky: Sky, ranks: Ranks) -> tuple[int, int, float]:
    """Put a ring over ranks of several heights or kinds, some of which wait."""
    sky.height[a : a + need] = end
    all_runs(sky, ranks)
    return a, need, begin


@kernel
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


@kernel
def _widened(rates: Rates, tokens: float, need: int, most: int, ranks: Ranks, room: float) -> int:
    """Return the least degree with which a ring fits the time that is left, if up to twice `need` does, else `need`."""
    if ring_time(rates, tokens, need, ranks.node, ranks.share) <= room:
        return need
    wider = least_degree(rates, tokens, need, min(2 * need, most), ranks.node, ranks.share, room)
    return wider if wider else need


@kernel
def _aligned(a: int, need: int, node: int) -> int:
    """Return the first rank from `a` on at which a ring does not cross a node's border, if it fits in a node at all."""
    return (a // node + 1) * node if need <= node < a % node + need else a


@kernel
def _spread(
    rates: Rates, tokens: float, sky: Sky, ranks: Ranks, a: int, need: int, gap: float, stop: float
) -> tuple[int, int, int]:
    """Return the first rank, the end and the degree of a ring that reaches over higher neighbours of its run.

    Its members wait up to `gap` for each other; it only does so where it is done by `stop`.
    """
    count = len(sky.height)
    first, last, most = a, a + sky.width[a], 2 * need
    height = sky.height[a]
    for _ in range(8):
        left = sky.begin[first] if first > 0 and same_kind(ranks, a, first - 1) else -1
        right = last if last < count and same_kind(ranks, a, last) else -1
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


@kernel
def _best_rank(ranks: Ranks) -> int:
    """Return the first of the fastest ranks, the largest of these."""
    best = 0
    for rank in range(1, len(ranks.slow)):
        if ranks.slow[rank] < ranks.slow[best] or (
            ranks.slow[rank] == ranks.slow[best] and ranks.holds[rank] > ranks.holds[best]
        ):
            best = rank
    return best


@kernel
def _floor(ranks: Ranks, a: int, tokens: float, gain: float) -> int:
    """Return the least degree that holds a sequence on ranks like `a`."""
    holds = max(ranks.holds[a], min(ranks.most[a], int(ranks.holds[a] * gain)))
    return int(-(-tokens // holds))


@kernel
def _lowest(height: Floats, width: int) -> int:
    """Return the first rank of the window whose highest rank is the lowest."""
    best, lowest = 0, np.inf
    for a in range(len(height) - width + 1):
        top = height[a : a + width].max()
        if top < lowest:
            best, lowest = a, top
    return best
