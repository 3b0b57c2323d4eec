"""Place rings on ranks so that all members of a ring become free at the same time.

A rank's height is the time until which it is busy; all heights together are the skyline. A run is a row of neighbouring
ranks of equal height, speed and capacity. Longest sequences first, each ring is placed on the lowest run that is wide
enough, so that none of its members waits for another:

```
 height |[ring 3    ]                       runs: ranks 0-5, ranks 6-11, and ranks 12-15, which are
        |[ring 1    ][ring 2    ]           too few for ring 3 and wait for a ring of at most four;
        +--------------------------------   a ring of five or six goes on ring 2
         0   2   4   6   8   10  12  14 ranks
```
- A run that is too narrow is set aside until rings need fewer ranks.
- If a ring would leave a part of a run unused, the run is first joined with neighbours of similar height (`join`).
- A ring may take a few more ranks than it needs if it then uses up a run (`stretch`).
- A ring that fits inside a node does not cross the border of a node.
- A ring that would end late may extend over neighbours that are a little higher; then some members wait (`gap`).
Letters: S sequences in descending order, P ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import njit, njit_in_place
from engine.cost.times import Rates, unsplit
from engine.planner.adaptive.runs import (
    NEEDED,
    SIZE,
    Sky,
    empty_sky,
    find_runs,
    highest,
    join,
    lowest,
    pop,
    push,
    put,
    same_kind,
    unite,
    wait,
    wake,
)
from engine.planner.adaptive.workload import Ranks
from engine.planner.time.bound import fastest, least_degree, least_degree_near, ring_time
from engine.units import Floats, Ints

_SPARE = 4  # most ranks that a ring takes in addition to those that it needs, to use up a run
_NEIGHBOURS = 8  # most neighbouring runs over which a late ring extends


class Rule(NamedTuple):
    """Parameters of ring placement. Times are multiples of the step's lower bound; `in_ns` converts them to ns."""

    limit: float  # no ring takes longer, if some degree is fast enough
    join: float  # runs whose heights differ by at most this are joined
    stretch: float  # a ring takes up to this many times the ranks that it needs if it then uses up a run
    top: float  # a ring that would end later tries further runs and up to twice the ranks that it needs
    tries: int = 8  # most runs that a ring tries
    gap: float = 0.05  # most time that members of a ring wait for each other, so that it ends by `top`

    def in_ns(self, bound: float) -> Rule:
        """The rule for a step whose lower bound is `bound` ns."""
        limit, join, gap, top = self.limit * bound, self.join * bound, self.gap * bound, self.top * bound
        return Rule(limit, join, self.stretch, top, self.tries, gap)


class Rings(NamedTuple):
    """The ring of each sequence, [S]; only the entries of placed sequences are used."""

    degree: Ints
    first: Ints  # first rank
    start: Floats  # ns from the start of the step


@njit
def place_rings(
    rates: Rates, lengths: Ints, gain: Floats, ranks: Ranks, rule: Rule, rings: Rings, height: Floats
) -> int:
    """Place rings, longest first, up to the first sequence that every rank can run unsplit; returns the number placed.

    A rank can run a sequence unsplit if it has the capacity and takes at most `rule.limit`. Writes to `rings`, and adds
    the rings' times to `height` [P]. With offload, a rank takes `gain` [S] times as many tokens of a sequence as its
    capacity. The times of `rule` are in ns (`Rule.in_ns`).
    """
    return _place_rings(rates, lengths, gain, ranks, rule, rings, height, empty_sky(height, len(lengths), rule.tries))


@njit_in_place
def _place_rings(
    rates: Rates, lengths: Ints, gain: Floats, ranks: Ranks, rule: Rule, rings: Rings, height: Floats, sky: Sky
) -> int:
    """`place_rings`, on an empty skyline over `height`."""
    find_runs(sky, ranks)
    best, small, slowest = _best_rank(ranks), lowest(ranks.holds), highest(ranks.slow)
    alike = ranks.slow[lowest(ranks.slow)] == slowest and highest(ranks.holds) == ranks.holds[small]
    wide = 1
    for at in range(len(lengths)):
        tokens = float(lengths[at])
        # Even the smallest and slowest rank can run this sequence unsplit, so it can run all shorter ones.
        if lengths[at] <= ranks.holds[small] and _ring_time(rates, tokens, 1, ranks) * slowest <= rule.limit:
            return at
        wide = _degree(rates, tokens, gain[at], best, ranks.slow[best], ranks, rule.limit, wide)
        # Degrees fall with the lengths: runs that were too narrow so far may be wide enough from here on.
        if wide < sky.counts[NEEDED]:
            wake(sky, wide)
        run, need, stop = _choose(rates, tokens, gain[at], wide, best, sky, ranks, rule)
        on_run = run >= 0 and (alike or stop <= rule.top)
        over, first, begin, end = 0, 0, 0.0, np.inf
        if not on_run:
            # No run is wide enough, or other ranks could be faster: try neighbours of any height, speed and capacity.
            over = _degree(rates, tokens, gain[at], small, slowest, ranks, rule.limit, wide)
            first = _lowest_window(height, over)
            begin = highest(height[first : first + over])
            end = begin + _ring_time(rates, tokens, over, ranks) * highest(ranks.slow[first : first + over])
            on_run = run >= 0 and stop <= end
        if on_run:
            rings.first[at], rings.degree[at], rings.start[at] = _on_run(
                rates, tokens, run, need, stop, sky, ranks, rule
            )
        else:
            rings.first[at], rings.degree[at], rings.start[at] = first, over, begin
            # The ring lies across several runs, so all runs are determined again.
            height[first : first + over] = end
            find_runs(sky, ranks)
    return len(lengths)


@njit_in_place
def _choose(
    rates: Rates, tokens: float, gain: float, wide: int, best: int, sky: Sky, ranks: Ranks, rule: Rule
) -> tuple[int, int, float]:
    """Choose a run for a sequence of `tokens`, among the lowest `rule.tries` runs that are wide enough.

    Takes the first run on which the ring ends by `rule.top`, else the one on which it ends first. Returns the run's
    first rank (-1 if no run is wide enough), the ring's degree, and its end in ns. `wide` is the degree that the ring
    needs on ranks of the same speed and capacity as rank `best`. Runs that are too narrow are set aside.
    """
    tried, found, found_need, found_stop = 0, -1, 0, np.inf
    while sky.counts[SIZE] > 0 and tried < rule.tries:
        a, width = pop(sky)
        if sky.width[a] != width:
            continue  # out of date: it was joined with another run
        need = wide
        # Ranks of another speed or capacity need another degree.
        if not same_kind(ranks, a, best):
            need = _degree(rates, tokens, gain, a, ranks.slow[a], ranks, rule.limit, wide)
        wider = _widened(rates, tokens, need, ranks, (rule.top - sky.height[a]) / ranks.slow[a])
        # The run would keep a rest of unused ranks, or is too narrow for a ring that ends in time: it is joined with
        # neighbours of almost the same height, where the ring's members hardly wait for each other.
        if width % need != 0 or wider > width:
            a, width = join(sky, ranks, a, rule.join)
        if _aligned(a, need, ranks.node) + need > a + width:
            wait(sky, a, width, need)
            continue
        if wider <= width and _aligned(a, wider, ranks.node) == a:
            need = wider
        stop = sky.height[a] + _ring_time(rates, tokens, need, ranks) * ranks.slow[a]
        sky.seen[tried] = a
        tried += 1
        if stop < found_stop:
            found, found_need, found_stop = a, need, stop
        if stop <= rule.top:
            break
    # Runs that were looked at but not chosen go back on the heap.
    for other in sky.seen[:tried]:
        if other != found and sky.width[other] > 0:
            push(sky, sky.height[other], other, sky.width[other])
    return found, found_need, found_stop


@njit_in_place
def _on_run(
    rates: Rates, tokens: float, a: int, need: int, stop: float, sky: Sky, ranks: Ranks, rule: Rule
) -> tuple[int, int, float]:
    """Put a ring on run `a`; returns its first rank, degree and start in ns.

    The ring needs `need` ranks and would end at `stop` ns. If that is after `rule.top`, it may extend over neighbours.
    """
    width = sky.width[a]
    # Starting a little later on more ranks may end earlier.
    if stop > rule.top and rule.gap > 0.0:
        first, last, need = _reach(rates, tokens, sky, ranks, a, need, rule.gap, rule.top)
        if last - first > width:
            unite(sky, first, last)
            a, width = first, last - first
    free = _aligned(a, need, ranks.node)
    rest = a + width - free
    # Uses up the run if that takes few ranks more: a narrow rest would be too small for other rings.
    if need < rest <= min(rule.stretch * need, need + _SPARE) and _aligned(free, rest, ranks.node) == free:
        need = rest
    time = _ring_time(rates, tokens, need, ranks) * ranks.slow[a]
    put(sky, a, width, free, need, time)
    return free, need, sky.height[free] - time


@njit_in_place
def _reach(
    rates: Rates, tokens: float, sky: Sky, ranks: Ranks, a: int, need: int, gap: float, stop: float
) -> tuple[int, int, int]:
    """Extend run `a` over neighbours that are at most `gap` ns higher, until a ring on all its ranks ends by `stop`.

    The ring takes at most twice the `need` ranks that it needs. Returns the first rank, the rank after the last one,
    and the ring's degree; those of run `a`, and `need`, if no extension is enough.
    """
    count = len(sky.height)
    first, last, most = a, a + sky.width[a], 2 * need
    height = sky.height[a]
    for _ in range(_NEIGHBOURS):
        left = sky.begin[first] if first > 0 and same_kind(ranks, a, first - 1) else -1
        right = last if last < count and same_kind(ranks, a, last) else -1
        if left < 0 and right < 0:
            break
        # The lower neighbour is taken, so that members wait as little as possible.
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
        if height + _ring_time(rates, tokens, degree, ranks) * ranks.slow[a] <= stop:
            return first, last, degree
    return a, a + sky.width[a], need


@njit_in_place
def _best_rank(ranks: Ranks) -> int:
    """The first rank with the largest capacity among the fastest ranks."""
    best = 0
    for rank in range(1, len(ranks.slow)):
        if ranks.slow[rank] < ranks.slow[best] or (
            ranks.slow[rank] == ranks.slow[best] and ranks.holds[rank] > ranks.holds[best]
        ):
            best = rank
    return best


@njit_in_place
def _aligned(a: int, need: int, node: int) -> int:
    """First rank from `a` on where a ring of `need` ranks is inside a node of `node` ranks; `a` if it is larger."""
    return (a // node + 1) * node if need <= node < a % node + need else a


@njit_in_place
def _lowest_window(height: Floats, width: int) -> int:
    """First rank of the `width` neighbouring ranks that are all free the earliest."""
    best, least = 0, np.inf
    for a in range(len(height) - width + 1):
        top = highest(height[a : a + width])
        if top < least:
            best, least = a, top
    return best


@njit_in_place
def _ring_time(rates: Rates, tokens: float, degree: int, ranks: Ranks) -> float:
    """Time of a ring of full-speed ranks, in ns."""
    return ring_time(rates, tokens, degree, ranks.node, ranks.overhead_per_token)


@njit_in_place
def _degree(
    rates: Rates, tokens: float, gain: float, like: int, slow: float, ranks: Ranks, limit: float, near: int
) -> int:
    """Smallest degree at which a ring fits in memory and takes at most `limit` ns; the fastest degree if none does.

    All its ranks are `slow` times slower than full speed and have the capacity of rank `like`, with offload times
    `gain`. It is found faster if it is `near`.
    """
    most, node, overhead = len(ranks.slow), ranks.node, ranks.overhead_per_token
    holds = max(ranks.holds[like], min(ranks.most[like], int(ranks.holds[like] * gain)))
    least = min(max(1, -(-int(tokens) // holds)), most)
    found = least_degree_near(rates, tokens, least, most, node, overhead, limit / slow, near)
    if found:
        return found
    best = fastest(rates, tokens, least, min(node, most), node, overhead) if least < node else least
    if most > node:
        beyond = fastest(rates, tokens, max(least, node + 1), most, node, overhead)
        if _ring_time(rates, tokens, beyond, ranks) < _ring_time(rates, tokens, best, ranks):
            return beyond
    return best


@njit_in_place
def _widened(rates: Rates, tokens: float, need: int, ranks: Ranks, left: float) -> int:
    """Smallest degree from `need` to twice `need` at which a ring takes at most `left` ns; `need` if none does."""
    if _ring_time(rates, tokens, need, ranks) <= left:
        return need
    most = min(2 * need, len(ranks.slow))
    # Rings never have less work than the unsplit sequence. Usually this alone excludes all degrees.
    if unsplit(rates, tokens) - rates.sequence > (1.0 + 1e-9) * most * left:
        return need
    wider = least_degree(rates, tokens, need, most, ranks.node, ranks.overhead_per_token, left)
    return wider if wider else need
