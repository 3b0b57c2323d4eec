"""Small steps, where every choice counts: a seeded search over degrees and the order in which sequences are placed.

A sequence goes on the ranks that are free the earliest, as many as its degree says, and starts when the last of them
is free. Whole sequences share a rank's open micro-batch while there is room. Changes that do not make the step longer
are kept.
Letters: S sequences, P ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import kernel
from engine.cost.times import Rates
from engine.planner.bound import Floats, ring_time
from engine.planner.plan import Ints

_TRIES = 4000
_RESTARTS = 4


class Placed(NamedTuple):
    """Where sequences lie: the ranks of each, ascending, [S, P], and when each begins, [S].

    A whole sequence that shares a micro-batch begins when that did.
    """

    members: Ints
    begin: Floats


@kernel
def times_by_degree(rates: Rates, lengths: Ints, ranks: int) -> Floats:
    """Return t(s, D) without a micro-batch's fixed cost, [2, S, P + 1]: inside a node, and over several.

    No sequence has degree 0.
    """
    times = np.full((2, len(lengths), ranks + 1), np.inf)
    for at in range(len(lengths)):
        for degree in range(1, ranks + 1):
            times[0, at, degree] = ring_time(rates, float(lengths[at]), degree, ranks, 0.0)
            times[1, at, degree] = ring_time(rates, float(lengths[at]), degree, 1, 0.0)
    return times


@kernel
def search(
    times: Floats, micro: float, lengths: Ints, floors: Ints, holds: int, slow: Floats, node_of: Ints, start: Ints
) -> tuple[float, Ints, Ints]:
    """Return the least makespan found, ns, the order, [S], and the degrees, [S]; `start` are degrees to begin with."""
    count, ranks = len(lengths), len(slow)
    best, best_order, best_degree = np.inf, np.arange(count), start.copy()
    placed = Placed(np.empty((count, ranks), np.int64), np.empty(count))
    state = np.uint64(88172645463325252)
    for restart in range(_RESTARTS):
        order = np.arange(count)
        degree = start.copy() if restart == 0 else floors.copy()
        now = place(times, micro, lengths, holds, slow, node_of, order, degree, placed)
        for _ in range(_TRIES // _RESTARTS):
            state = _random(state)
            i = int(state % np.uint64(count))
            state = _random(state)
            j = int(state % np.uint64(count))
            state = _random(state)
            old = degree[i]
            if state % np.uint64(2) == 0:
                most = max(floors[i], min(ranks, (lengths[i] + 1) // 2))  # a chunk of a token each, at least
                degree[i] = floors[i] + int((state >> np.uint64(8)) % np.uint64(most - floors[i] + 1))
            else:
                order[i], order[j] = order[j], order[i]
            after = place(times, micro, lengths, holds, slow, node_of, order, degree, placed)
            if after <= now:
                now = after
            elif degree[i] != old:
                degree[i] = old
            elif state % np.uint64(2) == 1:
                order[i], order[j] = order[j], order[i]
        if now < best:
            best, best_order, best_degree = now, order.copy(), degree.copy()
    return best, best_order, best_degree


@kernel
def _random(state: np.uint64) -> np.uint64:
    """Return the next of a fixed row of numbers (Marsaglia's xorshift64)."""
    state ^= state << np.uint64(13)
    state ^= state >> np.uint64(7)
    return state ^ (state << np.uint64(17))


@kernel
def place(
    times: Floats,
    micro: float,
    lengths: Ints,
    holds: int,
    slow: Floats,
    node_of: Ints,
    order: Ints,
    degree: Ints,
    placed: Placed,
) -> float:
    """Place the sequences in `order`; return the makespan. Fills `placed`."""
    ranks = len(slow)
    height, opened, room = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks, np.int64)
    for at in order:
        members = placed.members[at, : degree[at]]
        _lowest(height, members)
        top, slowest, first = 0.0, 0.0, members[0]
        apart = 0
        for rank in members:
            top, slowest = max(top, height[rank]), max(slowest, slow[rank])
            apart = max(apart, int(node_of[rank] != node_of[first]))
        if degree[at] == 1 and lengths[at] <= room[first]:  # into the open micro-batch
            placed.begin[at] = opened[first]
            room[first] -= lengths[at]
            height[first] += times[0, at, 1] * slowest
            continue
        placed.begin[at] = top
        for rank in members:
            height[rank] = top + (times[apart, at, degree[at]] + micro) * slowest
            opened[rank] = top
            room[rank] = holds - lengths[at] if degree[at] == 1 else 0
    return height.max()


@kernel
def _lowest(height: Floats, members: Ints) -> None:
    """Fill `members` with the lowest ranks, ascending."""
    for place in range(len(members)):
        lowest = -1
        for rank in range(len(height)):
            if not _has(members, place, rank) and (lowest < 0 or height[rank] < height[lowest]):
                lowest = rank
        members[place] = lowest
    members.sort()


@kernel
def _has(members: Ints, count: int, rank: int) -> bool:
    for place in range(count):  # noqa: SIM110 (any() over a generator does not compile)
        if members[place] == rank:
            return True
    return False
