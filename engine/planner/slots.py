"""Slots in which all ranks meet, each as even as it can be: for lockstep mode, and for pipelines.

The longest sequence that is left opens a slot of length T. Those that one rank cannot hold, or not finish in T, come
first, each on the least ring that is done in T: neighbours in length cost about the same per token, so they fill time
and capacity together. What is still open, beside rings and above them, takes the longest sequences that fit, again and
again. Up to four equal ranks of a node are one gap: whole sequences go on each of them, or, if that leaves more open,
sequences cut in two, or in four.

```
 T |[ 4     ][ 4    ]                [1]           gaps: cut in two above the ring of 2, whole beside it,
   |[ring of 4      ][2     ][2     ][1][1]        and a short one above a longer one
   |[               ][ring of 2     ][1][1]        rings: sequences longer than T, or than capacity
   +-----------------------------------------
     0   1   2   3    4       5       6  7  ranks
```
T is the one, of about fifteen, with which all that is left would be done first.
Letters: S sequences in descending order, P ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import kernel
from engine.cost.times import Rates
from engine.planner.bound import Floats, fastest, least_degree, ring_time
from engine.planner.plan import Ints

_WIDE = 4  # ranks of a gap
_NEAR = 0.01  # of a slot: a gap that leaves less open is full
_LOSS = 0.03  # of what is left, that later slots will leave open
_SHORT = 0.125  # of a slot in which all ranks are full: shorter ones are not tried
_STEP = 0.8  # from one length that is tried to the next
_ROUNDS = 3  # of trying nearer to the best length


class Room(NamedTuple):
    """What a slot holds, and what it costs."""

    holds: int  # tokens of every rank
    own: Ints  # [P] tokens of each
    slow: Floats  # [P] how many times slower than full speed
    power: float  # ranks, by their speed
    node: int  # ranks of a node
    ranks: int
    charge: float  # ns of a slot beside its work
    top: float  # ns that no slot shall take, if its longest sequence can be done in less


class _Left(NamedTuple):
    """The sequences without a slot."""

    lengths: Ints  # [S]
    most: Floats  # [S] tokens of a rank in a ring, with offload
    times: Floats  # [_WIDE + 1, S] ns on a ring of so many


class _Slot(NamedTuple):
    """A slot, and what it takes of what is left."""

    height: Floats  # [P] ns
    tokens: Ints  # [P]
    degree: Ints  # [S] 0 if not taken
    first: Ints  # [S] first rank
    after: Ints  # [S + 1] leads to the next sequence that is not taken
    trial: Ints  # [S + 1] the last trial that took it


@kernel
def fill_slots(rates: Rates, lengths: Ints, most: Floats, room: Room, degree: Ints, first: Ints, slot: Ints) -> None:
    """Give every sequence its slot, its ring's degree and first rank, [S]."""
    times = np.zeros((_WIDE + 1, len(lengths)))
    for wide in range(1, _WIDE + 1):
        for at in range(len(lengths)):
            times[wide, at] = ring_time(rates, float(lengths[at]), wide, room.node, 0.0)
    rest = np.arange(len(lengths))
    number = 0
    while len(rest) > 0:
        left, chosen = _Left(lengths[rest], most[rest], times[:, rest]), _empty(len(rest), room.ranks)
        _fill(rates, left, room, _length(rates, left, room, chosen), chosen)
        if chosen.degree.max() == 0:  # by a rounding the longest is too long for its own time
            _put(chosen, left, 0, 0, _degrees(left, room, 0)[0], 0.0)
        taken = chosen.degree > 0
        degree[rest[taken]], first[rest[taken]], slot[rest[taken]] = chosen.degree[taken], chosen.first[taken], number
        rest = rest[~taken]
        number += 1


@kernel
def _empty(count: int, ranks: int) -> _Slot:
    own, more = np.zeros((2, count), np.int64), np.zeros((2, count + 1), np.int64)
    return _Slot(np.zeros(ranks), np.zeros(ranks, np.int64), own[0], own[1], more[0], more[1])


@kernel
def _length(rates: Rates, left: _Left, room: Room, slot: _Slot) -> float:
    """Return the best length of the next slot, ns: tried from the longest down, then nearer to the best."""
    mean = left.times[1].sum() / room.power
    low, high = _limits(rates, left, room, mean)
    limits = [high]
    while limits[-1] > low:
        limits.append(max(low, limits[-1] * _STEP))
    best, chosen, step = np.inf, high, _STEP
    for _ in range(1 + _ROUNDS):
        for limit in limits:
            even = limit + (1.0 + _LOSS) * max(0.0, mean - limit) + room.charge * (2.0 if limit < mean else 1.0)
            if even < best:  # else not even a slot without gaps would do
                _fill(rates, left, room, limit, slot)
                done = _done(left, room, slot)
                if done < best * (1.0 - 1e-9):
                    best, chosen = done, limit
        step = np.sqrt(step)
        limits = [max(low, chosen * step), chosen / step]
    return chosen


@kernel
def _limits(rates: Rates, left: _Left, room: Room, mean: float) -> tuple[float, float]:
    """Return the least length worth a try, and the one in which the longest sequence's ranks are full."""
    tokens, (floor, most) = float(left.lengths[0]), _degrees(left, room, 0)
    low = full = ring_time(rates, tokens, floor, room.node, 0.0)
    for first, last in ((floor, min(room.node, most)), (max(floor, room.node + 1), most)):
        if first <= last:
            quick = fastest(rates, tokens, first, last, room.node, 0.0)
            low = min(low, ring_time(rates, tokens, quick, room.node, 0.0))
    low *= room.slow.min()
    full = max(low, min(room.top, full * 1.0001 * room.slow.max() * max(1.0, room.holds * floor / tokens)))
    return max(low, min(_SHORT * full, mean)), full


@kernel
def _degrees(left: _Left, room: Room, at: int) -> tuple[int, int]:
    """Return the least and the largest degree of a sequence: what ranks hold, and no empty shards."""
    floor = min(room.ranks, int(-(-left.lengths[at] // max(float(room.holds), left.most[at]))))
    return floor, min(room.ranks, max(floor, (left.lengths[at] + 1) // 2))


@kernel
def _done(left: _Left, room: Room, slot: _Slot) -> float:
    """Return when all that is left would be done, ns: this slot, and the rest in slots about as even as others."""
    work, tokens = 0.0, 0
    for at in range(len(left.lengths)):
        if slot.degree[at] == 0:
            work += left.times[1, at]
            tokens += left.lengths[at]
    slots = max(1.0, tokens / (room.ranks * room.holds)) if tokens > 0 else 0.0
    return slot.height.max() + (1.0 + _LOSS) * work / room.power + (1.0 + slots) * room.charge


@kernel
def _fill(rates: Rates, left: _Left, room: Room, limit: float, slot: _Slot) -> None:
    """Fill a slot of this length."""
    slot.height[:], slot.tokens[:], slot.degree[:], slot.trial[:] = 0.0, 0, 0, 0
    slot.after[:] = np.arange(len(slot.after))
    _rings(rates, left, room, limit, slot)
    _gaps(left, room, max(limit, slot.height.max()), slot)


@kernel
def _rings(rates: Rates, left: _Left, room: Room, limit: float, slot: _Slot) -> None:
    """Place the sequences that need more than one rank, the longest first, until no rank is free."""
    used, at, need = 0, 0, _least(rates, left, room, limit / room.slow[0], 0)
    while at < len(left.lengths) and (need > 1 or left.lengths[at] > room.holds):  # with offload one may hold it
        a = _start(room, used, need)
        time = ring_time(rates, float(left.lengths[at]), need, room.node, 0.0)
        _put(slot, left, at, a, need, time * room.slow[a : a + need].max())
        used, at, high = a + need, at + 1, len(left.lengths)
        middle = at
        while at < high:  # the next one for which ranks are left: most often the very next one
            wants = _least(rates, left, room, limit / room.slow[min(used, room.ranks - 1)], middle)
            if wants <= room.ranks - used:
                high, need = middle, wants
            else:
                at = middle + 1
            middle = (at + high) // 2


@kernel
def _least(rates: Rates, left: _Left, room: Room, limit: float, at: int) -> int:
    """Return the least ranks that hold a sequence and are done in time, or all ranks if none are."""
    floor, most = _degrees(left, room, at)
    need = least_degree(rates, float(left.lengths[at]), floor, most, room.node, 0.0, limit)
    return need if need > 0 else room.ranks


@kernel
def _start(room: Room, used: int, need: int) -> int:
    """Return the first rank of the next ring: inside a node if it fits there."""
    border = (used // room.node + 1) * room.node
    crosses = need <= room.node < used % room.node + need
    return border if crosses and border + need <= room.ranks else used


@kernel
def _put(slot: _Slot, left: _Left, at: int, a: int, need: int, time: float) -> None:
    slot.height[a : a + need] += time
    slot.tokens[a : a + need] += -(-left.lengths[at] // need)
    slot.degree[at], slot.first[at], slot.after[at] = need, a, at + 1


@kernel
def _gaps(left: _Left, room: Room, limit: float, slot: _Slot) -> None:
    """Fill what is open, the largest gaps first, each with the least cut that nearly fills it."""
    border = [0]
    for rank in range(1, room.ranks):
        equal = slot.height[rank] == slot.height[rank - 1] and slot.tokens[rank] == slot.tokens[rank - 1]
        kin = room.slow[rank] == room.slow[rank - 1] and room.own[rank] == room.own[rank - 1]
        if rank % room.node % _WIDE == 0 or not equal or not kin:
            border.append(rank)
    start, end = np.array(border), np.append(np.array(border[1:], dtype=np.int64), room.ranks)
    trial = 0
    for gap in np.argsort(slot.height[start], kind="mergesort"):
        a, b = start[gap], end[gap]
        near = _NEAR * limit / room.slow[a] * (b - a)
        full = (limit - slot.height[a]) / room.slow[a] * (b - a) - near
        most, best, wide = -near, 0, 1
        while wide < 2 * (b - a) and most < full:
            trial += 1
            work = _fit(left, room, limit, slot, a, b, wide, trial, False)
            if work > most + near:
                most, best = work, wide
            wide *= 2
        if best > 0:
            trial += 1
            _fit(left, room, limit, slot, a, b, best, trial, True)


@kernel
def _fit(left: _Left, room: Room, limit: float, slot: _Slot, a: int, b: int, wide: int, trial: int, put: bool) -> float:
    """Fill ranks a .. b - 1, `wide` at a time, with the longest that fits, again and again; return the work, ns.

    Without `put` it is only tried.
    """
    work = 0.0
    for first in range(a, b, wide):
        need = min(wide, b - first)
        time, tokens, at = (limit - slot.height[first]) / room.slow[first], room.own[first] - slot.tokens[first], 0
        while True:
            at = _next(slot, max(at, _longest(left, need, time, tokens)), trial)
            if at >= len(left.lengths) or left.lengths[at] < 2 * need - 1:
                break
            work += left.times[1, at]
            time -= left.times[need, at]
            tokens -= -(-left.lengths[at] // need)
            slot.trial[at] = trial
            if put:
                _put(slot, left, at, first, need, left.times[need, at] * room.slow[first])
    return work


@kernel
def _longest(left: _Left, need: int, time: float, tokens: int) -> int:
    """Return the first sequence that takes no longer on `need` ranks, and no more of their tokens."""
    low, high = 0, len(left.lengths)
    while low < high:
        middle = (low + high) // 2
        if left.lengths[middle] <= tokens * need and left.times[need, middle] <= time:
            high = middle
        else:
            low = middle + 1
    return low


@kernel
def _next(slot: _Slot, at: int, trial: int) -> int:
    """Return the first sequence from `at` on that neither the slot nor this trial has taken (path halving)."""
    while True:
        while slot.after[at] != at:
            slot.after[at] = slot.after[slot.after[at]]
            at = slot.after[at]
        if slot.trial[at] != trial:
            return at
        at += 1
