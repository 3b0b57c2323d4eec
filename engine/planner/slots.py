"""Slots in which all ranks meet, each as even as it can be: for lockstep mode, and for pipelines.

The longest sequences that are left open a slot. Sequences of about one length cost about the same per token, so a slot
takes neighbours in descending order, each on the least ring that is done in T, until all ranks are taken. What is left
of a rank's time and capacity takes the longest whole sequence that fits, again and again. T is the one, of a few, at
which the slot's ranks work the largest share of its time.

```
 slot 0   [ring of 5        ][ring of 3   ]     T: at 2/3 of it the rings would be 8 and 4, more than 8 ranks
 slot 1   [ring of 3  ][ring of 2][2      ][1]
 slot 2   [1][1][1][1][1][1][1][1]              whole sequences, packed
```
Letters: S sequences in descending order, P ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from engine.cost.times import Rates
from engine.planner.bound import Floats, fastest, least_degree, ring_time
from engine.planner.plan import Ints

_SKIPS = 256  # sequences that a slot passes over before it is closed
_LENGTHS = 12  # lengths of a slot that are tried


class Room(NamedTuple):
    """What a slot holds."""

    holds: int  # tokens of a rank
    most: Floats  # [S] tokens of a rank in a ring, with offload
    node: int  # ranks of a node
    share: float  # ns of a micro-batch's fixed cost that a token pays
    ranks: int


class Try(NamedTuple):
    """How a slot's length is chosen."""

    fixed: float  # ns that a slot costs beside its work
    trust: float  # share of a rank's free time that topping up is expected to fill
    accept: float  # a ring that takes less than this share of the slot waits for another slot


class _Slot(NamedTuple):
    """A slot that is being filled, and what is left: `after` [S + 1] leads to the next sequence without a slot."""

    after: Ints
    times: Floats  # [P]
    tokens: Ints  # [P]
    degree: Ints  # [S]
    first: Ints  # [S]
    slot: Ints  # [S]


@njit(cache=True)
def fill_slots(rates: Rates, lengths: Ints, room: Room, rule: Try, degree: Ints, first: Ints, slot: Ints) -> float:
    """Give every sequence its slot, its ring's degree and first rank, [S]; return the time of all slots, ns."""
    count = len(lengths)
    state = _Slot(np.arange(count + 1), np.zeros(room.ranks), np.zeros(room.ranks, np.int64), degree, first, slot)
    number, total = 0, 0.0
    head = 0
    while head < count:
        best, chosen = -1.0, 0.0
        low, high = _limits(rates, float(lengths[head]), head, room)
        for turn in range(_LENGTHS):
            limit = 1.0001 * high * (low / high) ** (turn / (_LENGTHS - 1.0))
            work = _fill(rates, lengths, room, rule, limit, state, -1)
            if work > best * (1.0 + 1e-9):
                best, chosen = work, limit
        _fill(rates, lengths, room, rule, chosen, state, number)
        _top_up(rates, lengths, room, state, number)
        number += 1
        total += state.times.max()
        head = _next(state.after, head)
    return total


@njit(cache=True)
def _next(after: Ints, at: int) -> int:
    """Return the first sequence from `at` on without a slot (union-find with path halving)."""
    while after[at] != at:
        after[at] = after[after[at]]
        at = after[at]
    return at


@njit(cache=True)
def _limits(rates: Rates, tokens: float, head: int, room: Room) -> tuple[float, float]:
    """Return the least and the largest time that a slot with this head may take."""
    floor = _floor(tokens, head, room)
    if floor == 1:
        whole = ring_time(rates, tokens, 1, room.node, room.share)
        return whole / max(1.0, min(float(room.node), tokens / 512.0)), whole * max(1.0, room.holds / tokens)
    quick = room.ranks
    if room.ranks > room.node:
        quick = fastest(rates, tokens, max(floor, room.node + 1), room.ranks, room.node, room.share)
    low = ring_time(rates, tokens, quick, room.node, room.share)
    high = ring_time(rates, tokens, floor, room.node, room.share)
    return min(low, high), max(low, high)


@njit(cache=True)
def _floor(tokens: float, at: int, room: Room) -> int:
    return min(room.ranks, int(-(-tokens // max(float(room.holds), room.most[at]))))


@njit(cache=True)
def _fill(rates: Rates, lengths: Ints, room: Room, rule: Try, limit: float, state: _Slot, number: int) -> float:
    """Fill a slot with rings that are done in `limit`; return the share of its time that ranks would work.

    With a `number` of 0 or more it is done, else only tried.
    """
    state.times[:] = 0.0
    state.tokens[:] = 0
    used, skips, work, longest = 0, 0, 0.0, 0.0
    at = _next(state.after, 0)
    while used < room.ranks and at < len(lengths) and skips < _SKIPS:
        tokens = float(lengths[at])
        need = least_degree(rates, tokens, _floor(tokens, at, room), room.ranks, room.node, room.share, limit)
        if need == 0 and used == 0:
            need = room.ranks
        time = ring_time(rates, tokens, max(1, need), room.node, room.share)
        poor = used > 0 and need > 1 and time < rule.accept * longest
        if need == 0 or used + need > room.ranks or poor:
            skips += 1
        else:
            used = _place(lengths, room, state, at, used, need, time, number)
            work += time * need
            longest = max(longest, time)
        at = _next(state.after, at + 1)
    if number < 0:  # what topping up may add: whole sequences at the price of linear layers
        price = rates.token_f + rates.token_b + room.share
        for rank in range(used):
            spare = min(longest - state.times[rank], (room.holds - state.tokens[rank]) * price)
            work += rule.trust * max(0.0, spare)
    return work / (room.ranks * (longest + rule.fixed)) if longest > 0.0 else 0.0


@njit(cache=True)
def _place(lengths: Ints, room: Room, state: _Slot, at: int, used: int, need: int, time: float, number: int) -> int:
    """Put a sequence on the next ranks, inside a node if it fits there; return how many ranks are used up."""
    a = used
    border = (a // room.node + 1) * room.node
    if need <= room.node < a % room.node + need and border + need <= room.ranks:
        a = border
    state.times[a : a + need] = time
    state.tokens[a : a + need] = -(-lengths[at] // need)
    if number >= 0:
        _note(state, at, need, a, number)
    return a + need


@njit(cache=True)
def _note(state: _Slot, at: int, need: int, a: int, number: int) -> None:
    state.degree[at], state.first[at], state.slot[at] = need, a, number
    state.after[at] = at + 1


@njit(cache=True)
def _top_up(rates: Rates, lengths: Ints, room: Room, state: _Slot, number: int) -> None:
    """Give each rank the longest whole sequences that fit what is left of the slot's time and of its capacity."""
    limit = state.times.max()
    for rank in np.argsort(state.times, kind="mergesort"):
        while True:
            spare = limit - state.times[rank]
            at = _next(state.after, _longest(rates, lengths, room, spare, room.holds - state.tokens[rank]))
            if at >= len(lengths):
                break
            state.times[rank] += ring_time(rates, float(lengths[at]), 1, room.node, room.share)
            state.tokens[rank] += lengths[at]
            _note(state, at, 1, rank, number)


@njit(cache=True)
def _longest(rates: Rates, lengths: Ints, room: Room, spare: float, tokens: int) -> int:
    """Return the first sequence that is no longer than `tokens` and takes no longer than `spare`."""
    low, high = 0, len(lengths)
    while low < high:
        middle = (low + high) // 2
        if lengths[middle] <= tokens and ring_time(rates, float(lengths[middle]), 1, room.node, room.share) <= spare:
            high = middle
        else:
            low = middle + 1
    return low
