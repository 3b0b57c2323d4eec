"""Assign unsplit sequences to ranks after rings are placed: longest processing time first, then swaps, then packing.

Letters: P ranks, W unsplit sequences in descending order of time.
"""

from __future__ import annotations

import numpy as np

from engine.compiled import njit, njit_in_place
from engine.planner.plan.rows import ascending, grouped
from engine.units import Floats, Ints


@njit
def deal(times: Floats, slow: Floats, height: Floats) -> Ints:
    """Give each sequence in turn to the rank that is free first (LPT); returns the rank of each, [W].

    `times` [W] are ns at full speed; rank r is `slow[r]` times slower. The times are added to `height` [P], the ns
    until which each rank is busy. Of ranks that are free at the same time the first one gets the sequence.
    """
    # A tournament: node i has the winner of nodes 2i and 2i + 1, and leaf `leaves` + r is rank r.
    leaves = 1
    while leaves < len(height):
        leaves *= 2
    free, winner = np.full(2 * leaves, np.inf), np.zeros(2 * leaves, np.int64)
    for rank in range(len(height)):
        free[leaves + rank], winner[leaves + rank] = height[rank], rank
    for node in range(leaves - 1, 0, -1):
        first = 2 * node if free[2 * node] <= free[2 * node + 1] else 2 * node + 1
        free[node], winner[node] = free[first], winner[first]
    rank_of = np.empty(len(times), np.int64)
    _deal(times, slow, height, free, winner, rank_of)
    return rank_of


@njit_in_place
def _deal(times: Floats, slow: Floats, height: Floats, free: Floats, winner: Ints, rank_of: Ints) -> None:
    """Fill `rank_of` [W] by the tournament of `deal`: of each node the `winner`, and the ns at which it is free."""
    leaves = len(free) // 2
    for at in range(len(times)):
        best = winner[1]
        rank_of[at] = best
        height[best] += times[at] * slow[best]
        node, end = leaves + best, height[best]
        free[node] = end
        while node > 1:
            other = node ^ 1
            # Without branches: the processor cannot predict them.
            wins = (free[other] < end) | ((free[other] == end) & (other < node))
            best = winner[other] if wins else best
            end = free[other] if wins else end
            node //= 2
            free[node], winner[node] = end, best


@njit
def even_out(times: Floats, slow: Floats, height: Floats, rank_of: Ints, target: float, passes: int) -> None:
    """Swap sequences between busy and less busy ranks; changes `height` [P] and `rank_of` [W].

    A pass pairs the busiest ranks with the least busy ones; the first pass pairs the busiest with the least busy, the
    next one with the second least busy, and so on. Stops when no rank is busy beyond `target` ns, after `passes`
    passes, or when two passes in a row did not lower the highest rank.
    """
    ranks = len(height)
    first, owned = grouped(rank_of, ranks)
    half, idle = ranks // 2, 0
    for turn in range(passes):
        top = height.max()
        if top <= target or idle == 2:
            return
        order = ascending(height.view(np.int64))  # times are not negative, so their bits have the same order
        for i in range(half):
            full, other = order[ranks - 1 - i], order[(i + turn) % half]
            if height[full] <= target:
                break
            if height[full] - height[other] > 1e-6 * top:
                _swap_best(times, slow, height, rank_of, first, owned, full, other)
        idle = idle + 1 if height.max() >= top else 0


@njit_in_place
def _swap_best(
    times: Floats, slow: Floats, height: Floats, rank_of: Ints, first: Ints, owned: Ints, full: int, other: int
) -> None:
    """Swap the pair of sequences of ranks `full` and `other` that most lowers the higher of both, if any pair does.

    The sequences of rank r are owned[first[r] : first[r + 1]].
    """
    best, mine, theirs = height[full], -1, -1
    for i in range(first[full], first[full + 1]):
        for j in range(first[other], first[other + 1]):
            gain = times[owned[i]] - times[owned[j]]
            if gain <= 0.0:
                continue
            new = max(height[full] - gain * slow[full], height[other] + gain * slow[other])
            if new < best:
                best, mine, theirs = new, i, j
    if mine < 0:
        return
    a, b = owned[mine], owned[theirs]
    gain = times[a] - times[b]
    height[full] -= gain * slow[full]
    height[other] += gain * slow[other]
    rank_of[a], rank_of[b] = other, full
    owned[mine], owned[theirs] = b, a


@njit
def pack(lengths: Ints, rank_of: Ints, holds: Ints) -> Ints:
    """Pack the sequences of each rank r first-fit into micro-batches of at most `holds[r]` tokens.

    Returns the micro-batch of each sequence, counted from 0 on its rank, [W].
    """
    ranks = len(holds)
    first, _ = grouped(rank_of, ranks)
    space = np.zeros(len(lengths), np.int64)  # free tokens of the micro-batches of rank r, from space[first[r]] on
    bins = np.zeros(ranks, np.int64)  # micro-batches of each rank
    found = np.empty(len(lengths), np.int64)
    for at in range(len(lengths)):
        rank = rank_of[at]
        number = 0
        while number < bins[rank] and space[first[rank] + number] < lengths[at]:
            number += 1
        if number == bins[rank]:
            bins[rank] += 1
            space[first[rank] + number] = holds[rank]
        space[first[rank] + number] -= lengths[at]
        found[at] = number
    return found
