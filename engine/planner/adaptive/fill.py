"""Fill slots one after another, each as evenly as possible: for lockstep mode and for pipelines.

The longest remaining sequence opens a slot that should take T ns (`limit` below). Sequences that do not fit on one
rank, or that one rank cannot finish within T, come first, each on the smallest ring that finishes within T. Sequences
of similar length cost about the same per token, so these rings use up time and capacity at the same rate. The longest
sequences that fit then fill the gaps above the rings and next to them. A gap is up to four neighbouring ranks of a node
that are equally full. It takes unsplit sequences, or, if they would leave more of it empty, sequences split in two or
in four.

```
 T |[ 4     ][ 4    ]                [1]           gaps: split in two above the ring of 2, unsplit next to
   |[ring of 4      ][2     ][2     ][1][1]        it, and a short one above a longer one
   |[               ][ring of 2     ][1][1]        rings: sequences longer than T, or than capacity
   +-----------------------------------------
     0   1   2   3    4       5       6  7  ranks
```
About 15 values of T are tried; the one with the earliest estimated end of the whole step is used.
Letters: S sequences in descending order, P ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import njit
from engine.cost.times import Rates
from engine.planner.time.bound import fastest, least_degree, ring_time
from engine.units import Floats, Ints

_WIDE = 4  # most ranks of a gap
_NEAR = 0.01  # fraction of a slot: a gap with less time left counts as full
_LOSS = 0.03  # expected idle time of later slots, as a fraction of their work
_SHORT = 0.125  # shortest slot that is tried, as a fraction of one that fills the ranks' capacity
_STEP = 0.8  # ratio of successive slot lengths that are tried
_ROUNDS = 3  # refinements around the best slot length


class Slot(NamedTuple):
    """What all slots of a step have in common: their ranks, in the order of the plan, and their fixed cost."""

    holds: int  # tokens that fit on the rank with the least memory
    own: Ints  # [P] tokens that fit on each rank
    slow: Floats  # [P] how many times slower than full speed; in no order
    power: float  # sum of the speeds of all ranks; 1 is full speed
    node: int  # ranks per node
    ranks: int  # P
    charge: float  # ns that a slot costs in addition to its work
    top: float  # ns; no longer slot is tried, unless its longest sequence needs more


class _Rest(NamedTuple):
    """The sequences that have no slot yet, longest first."""

    lengths: Ints  # [S]
    most: Floats  # [S] tokens of the sequence that fit on a rank of its ring, with offload
    times: Floats  # [_WIDE + 1, S] ns on a ring of 1 .. _WIDE ranks; row 0 is unused


class _Filling(NamedTuple):
    """The content of one slot while it is filled."""

    height: Floats  # [P] ns until which each rank is busy
    tokens: Ints  # [P] tokens on each rank
    degree: Ints  # [S] 0 if the sequence is not in this slot
    first: Ints  # [S] first rank of the ring
    after: Ints  # [S + 1] union-find link towards the next sequence that is not in this slot
    trial: Ints  # [S + 1] number of the last trial that used the sequence


@njit
def fill_slots(rates: Rates, lengths: Ints, most: Floats, slot: Slot, degree: Ints, first: Ints, number: Ints) -> None:
    """Put every sequence into a slot: writes its ring degree, first rank and slot number to the last three arguments.

    All arrays are [S]; `lengths` is in descending order. `most` is how many tokens of each sequence fit on one rank.
    """
    # The times on rings of up to `_WIDE` ranks are computed once, because every trial of a slot length reads them.
    times = np.zeros((_WIDE + 1, len(lengths)))
    for wide in range(1, _WIDE + 1):
        for at in range(len(lengths)):
            times[wide, at] = ring_time(rates, float(lengths[at]), wide, slot.node, 0.0)
    # Each slot is filled from the sequences that no earlier slot took. `open_` keeps them in descending order, on which
    # the bisections below rely.
    open_ = np.arange(len(lengths))
    slots = 0
    while len(open_) > 0:
        rest, count = _Rest(lengths[open_], most[open_], times[:, open_]), len(open_)
        own, links = np.zeros((2, count), np.int64), np.zeros((2, count + 1), np.int64)
        filling = _Filling(np.zeros(slot.ranks), np.zeros(slot.ranks, np.int64), own[0], own[1], links[0], links[1])
        _fill(rates, rest, slot, _best_length(rates, rest, slot, filling), filling)
        if filling.degree.max() == 0:  # by a rounding error, not even the longest sequence fits its own slot
            _put(filling, rest, 0, 0, _degrees(rest, slot, 0)[0], 0.0)
        taken = filling.degree > 0
        placed = open_[taken]
        degree[placed], first[placed], number[placed] = filling.degree[taken], filling.first[taken], slots
        open_ = open_[~taken]
        slots += 1


@njit
def _best_length(rates: Rates, rest: _Rest, slot: Slot, filling: _Filling) -> float:
    """Choose the length of the next slot, in ns: tries lengths from the longest down, then around the best one.

    `filling` is overwritten with trials.
    """
    # The time that the remaining work takes if no rank idles: a lower bound of the rest of the step.
    mean = rest.times[1].sum() / slot.power

    # From the shortest slot in which the longest sequence can finish to the slot that fills its ranks' capacity.
    tokens, (floor, widest) = float(rest.lengths[0]), _degrees(rest, slot, 0)
    low = high = ring_time(rates, tokens, floor, slot.node, 0.0)
    # The fastest degree is looked for among rings inside a node, and then among larger ones, whose links are slower.
    for begin, end in ((floor, min(slot.node, widest)), (max(floor, slot.node + 1), widest)):
        if begin <= end:
            quick = fastest(rates, tokens, begin, end, slot.node, 0.0)
            low = min(low, ring_time(rates, tokens, quick, slot.node, 0.0))
    low *= slot.slow.min()
    # The 0.01 % keep a rounding error from excluding the longest sequence itself.
    high = max(low, min(slot.top, high * 1.0001 * slot.slow.max() * max(1.0, slot.holds * floor / tokens)))
    # Much shorter slots only add fixed costs, unless little work is left.
    low = max(low, min(_SHORT * high, mean))

    # First lengths from the longest down, each `_STEP` times the one before. Then, `_ROUNDS` times, the two neighbours
    # of the best length, with the square root of the ratio.
    limits = [high]
    while limits[-1] > low:
        limits.append(max(low, limits[-1] * _STEP))
    best, chosen, step = np.inf, high, _STEP
    for _ in range(1 + _ROUNDS):
        for limit in limits:
            at_best = limit + (1.0 + _LOSS) * max(0.0, mean - limit) + slot.charge * (2.0 if limit < mean else 1.0)
            if at_best < best:  # otherwise even a slot without gaps would be no better than the best one
                _fill(rates, rest, slot, limit, filling)
                finish = _estimated_finish(rest, slot, filling)
                if finish < best * (1.0 - 1e-9):
                    best, chosen = finish, limit
        step = np.sqrt(step)
        limits = [max(low, chosen * step), chosen / step]
    return chosen


@njit
def _degrees(rest: _Rest, slot: Slot, at: int) -> tuple[int, int]:
    """Smallest degree at which sequence `at` fits in memory, and largest degree to try for it.

    The largest leaves at most one of the 2D chunks of the sequence empty, unless memory needs a larger degree.
    """
    floor = min(slot.ranks, int(-(-rest.lengths[at] // max(float(slot.holds), rest.most[at]))))
    return floor, min(slot.ranks, max(floor, (rest.lengths[at] + 1) // 2))


@njit
def _estimated_finish(rest: _Rest, slot: Slot, filling: _Filling) -> float:
    """Estimated time of this slot and all later ones, in ns, if ranks idle for `_LOSS` of the later work."""
    work, tokens = 0.0, 0
    for at in range(len(rest.lengths)):
        if filling.degree[at] == 0:
            work += rest.times[1, at]
            tokens += rest.lengths[at]
    slots = max(1.0, tokens / (slot.ranks * slot.holds)) if tokens > 0 else 0.0
    return filling.height.max() + (1.0 + _LOSS) * work / slot.power + (1.0 + slots) * slot.charge


@njit
def _fill(rates: Rates, rest: _Rest, slot: Slot, limit: float, filling: _Filling) -> None:
    """Fill a slot of `limit` ns with sequences of `rest`; overwrites `filling`."""
    filling.height[:], filling.tokens[:], filling.degree[:], filling.trial[:] = 0.0, 0, 0, 0
    filling.after[:] = np.arange(len(filling.after))
    _place_rings(rates, rest, slot, limit, filling)
    _fill_gaps(rest, slot, max(limit, filling.height.max()), filling)


@njit
def _place_rings(rates: Rates, rest: _Rest, slot: Slot, limit: float, filling: _Filling) -> None:
    """Place the sequences that need more than one rank, the longest first, until no rank is left."""
    # Degrees are chosen for the speed of the first free rank. Ranks are not in order of speed, so a ring whose slowest
    # rank is slower, or which begins behind a border, may end after `limit`; `_fill` then fills up to that end.
    used, at, need = 0, 0, _least_ranks(rates, rest, slot, limit / slot.slow[0], 0)
    # A sequence of more tokens than `holds` may need one rank only, which offloads a part of it. It is placed here too:
    # `_fill_gaps` counts all tokens of a sequence, without offload.
    while at < len(rest.lengths) and (need > 1 or rest.lengths[at] > slot.holds):
        # A ring that fits in a node does not cross a border of nodes, where links are slower, if there are enough ranks
        # behind that border.
        border = (used // slot.node + 1) * slot.node
        crosses = need <= slot.node < used % slot.node + need
        a = border if crosses and border + need <= slot.ranks else used
        time = ring_time(rates, float(rest.lengths[at]), need, slot.node, 0.0)
        _put(filling, rest, at, a, need, time * slot.slow[a : a + need].max())
        used, at, high = a + need, at + 1, len(rest.lengths)
        # Bisect for the next sequence that fits the remaining ranks, but check the very next one first, which often
        # does. A shorter one is taken to need no more ranks. Those that are skipped may still be split over gaps; else
        # they wait for a later slot.
        middle = at
        while at < high:
            wants = _least_ranks(rates, rest, slot, limit / slot.slow[min(used, slot.ranks - 1)], middle)
            if wants <= slot.ranks - used:
                high, need = middle, wants
            else:
                at = middle + 1
            middle = (at + high) // 2


@njit
def _least_ranks(rates: Rates, rest: _Rest, slot: Slot, limit: float, at: int) -> int:
    """Fewest ranks on which sequence `at` fits and finishes within `limit` ns; all ranks if no number is enough."""
    floor, widest = _degrees(rest, slot, at)
    need = least_degree(rates, float(rest.lengths[at]), floor, widest, slot.node, 0.0, limit)
    if need >= 2 * rates.team:  # whole teams
        need = min(slot.ranks, -(-need // rates.team) * rates.team)
    return need if need > 0 else slot.ranks


@njit
def _put(filling: _Filling, rest: _Rest, at: int, a: int, need: int, time: float) -> None:
    """Put sequence `at` on a ring of `need` ranks from rank `a` on, for `time` ns."""
    filling.height[a : a + need] += time
    filling.tokens[a : a + need] += -(-rest.lengths[at] // need)
    filling.degree[at], filling.first[at], filling.after[at] = need, a, at + 1


@njit
def _fill_gaps(rest: _Rest, slot: Slot, limit: float, filling: _Filling) -> None:
    """Fill the gaps of a slot of `limit` ns, the largest first, with sequences split as little as possible."""
    # The ranks of a gap have the same height, tokens, speed and capacity, so a ring on them ends evenly. The mergesort
    # is stable: gaps of equal height keep their order on every machine.
    border = [0]
    for rank in range(1, slot.ranks):
        equal = filling.height[rank] == filling.height[rank - 1] and filling.tokens[rank] == filling.tokens[rank - 1]
        same_kind = slot.slow[rank] == slot.slow[rank - 1] and slot.own[rank] == slot.own[rank - 1]
        if rank % slot.node % _WIDE == 0 or not equal or not same_kind:
            border.append(rank)
    start, end = np.array(border), np.append(np.array(border[1:], dtype=np.int64), slot.ranks)
    trial = 0
    for gap in np.argsort(filling.height[start], kind="mergesort"):
        a, b = start[gap], end[gap]
        # Unsplit sequences are tried first, then rings of two and of four ranks, without placing any. The best width is
        # then filled in earnest.
        near = _NEAR * limit / slot.slow[a] * (b - a)
        full = (limit - filling.height[a]) / slot.slow[a] * (b - a) - near
        most_work, best, wide = -near, 0, 1
        while wide < 2 * (b - a) and most_work < full:  # further splitting must add more work than `near`
            trial += 1
            work = _fill_gap(rest, slot, limit, filling, a, b, wide, trial, False)
            if work > most_work + near:
                most_work, best = work, wide
            wide *= 2
        if best > 0:
            trial += 1
            _fill_gap(rest, slot, limit, filling, a, b, best, trial, True)


@njit
def _fill_gap(
    rest: _Rest, slot: Slot, limit: float, filling: _Filling, a: int, b: int, wide: int, trial: int, put: bool
) -> float:
    """Fill ranks a .. b - 1 up to `limit` ns with rings of `wide` ranks, always taking the longest sequence that fits.

    Returns the work of these sequences, in ns. If `put` is False, only measures the work and places nothing. `trial`
    numbers the calls: `filling.trial` stores it for each sequence taken, so that no call takes a sequence twice.
    """
    work = 0.0
    for first in range(a, b, wide):
        need = min(wide, b - first)
        time, tokens = (limit - filling.height[first]) / slot.slow[first], slot.own[first] - filling.tokens[first]
        # Greedy: the longest open sequence that still fits, then the next one, until none is left that is long enough
        # for a ring of `need` ranks, in which at most one of the 2 x `need` chunks may be empty.
        at = 0
        while True:
            at = _next_open(filling, max(at, _longest(rest, need, time, tokens)), trial)
            if at >= len(rest.lengths) or rest.lengths[at] < 2 * need - 1:
                break
            work += rest.times[1, at]
            time -= rest.times[need, at]
            tokens -= -(-rest.lengths[at] // need)
            filling.trial[at] = trial
            if put:
                _put(filling, rest, at, first, need, rest.times[need, at] * slot.slow[first])
    return work


@njit
def _longest(rest: _Rest, need: int, time: float, tokens: int) -> int:
    """Index of the longest sequence that `need` ranks finish within `time` ns and `tokens` tokens each; S if none."""
    low, high = 0, len(rest.lengths)
    while low < high:
        middle = (low + high) // 2
        if rest.lengths[middle] <= tokens * need and rest.times[need, middle] <= time:
            high = middle
        else:
            low = middle + 1
    return low


@njit
def _next_open(filling: _Filling, at: int, trial: int) -> int:
    """First sequence from `at` on that is in neither this slot nor this trial, or S (union-find with path halving)."""
    while True:
        while filling.after[at] != at:
            filling.after[at] = filling.after[filling.after[at]]
            at = filling.after[at]
        if filling.trial[at] != trial:
            return at
        at += 1
