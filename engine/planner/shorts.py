"""Whole sequences on ranks whose rings are placed: the longest first, each to the rank that is done the earliest.

Then full ranks swap with empty ones while that makes the step shorter.
Letters: P ranks, W whole sequences in descending order of time.
"""

from __future__ import annotations

import numpy as np

from engine.compiled import kernel
from engine.planner.bound import Floats
from engine.planner.plan import Ints
from engine.planner.rows import grouped


@kernel
def deal(times: Floats, slow: Floats, height: Floats) -> Ints:
    """Return the rank of each whole sequence, [W]; raises `height` [P]. A heap of ranks by height (LPT)."""
    ranks = len(height)
    heap = np.argsort(height, kind="mergesort")
    rank_of = np.empty(len(times), np.int64)
    for at in range(len(times)):
        rank = heap[0]
        rank_of[at] = rank
        height[rank] += times[at] * slow[rank]
        place = 0
        while True:
            child = 2 * place + 1
            if child >= ranks:
                break
            if child + 1 < ranks and _lower(height, heap[child + 1], heap[child]):
                child += 1
            if not _lower(height, heap[child], rank):
                break
            heap[place] = heap[child]
            place = child
        heap[place] = rank
    return rank_of


@kernel
def _lower(height: Floats, a: int, b: int) -> bool:
    return height[a] < height[b] or (height[a] == height[b] and a < b)


@kernel
def even_out(times: Floats, slow: Floats, height: Floats, rank_of: Ints, target: float, passes: int) -> None:
    """Let full ranks swap whole sequences with empty ones, the fullest with the emptiest, then with the next.

    Ends when no rank is above `target`, after `passes`, or when two in a row have not helped the fullest rank.
    """
    ranks = len(height)
    first, owned = grouped(rank_of, ranks)
    half, idle = ranks // 2, 0
    for turn in range(passes):
        top = height.max()
        if top <= target or idle == 2:
            return
        order = np.argsort(height, kind="mergesort")
        for i in range(half):
            full, other = order[ranks - 1 - i], order[(i + turn) % half]
            if height[full] <= target:
                break
            if height[full] - height[other] > 1e-6 * top:
                _swap_best(times, slow, height, rank_of, first, owned, full, other)
        idle = idle + 1 if height.max() >= top else 0


@kernel
def _swap_best(
    times: Floats, slow: Floats, height: Floats, rank_of: Ints, first: Ints, owned: Ints, full: int, other: int
) -> None:
    """Swap the two sequences that leave the higher of both ranks the lowest."""
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


@kernel
def pack(lengths: Ints, rank_of: Ints, holds: Ints) -> Ints:
    """Return the micro-batch of each whole sequence within its rank, [W]: first fit in descending order of length."""
    ranks = len(holds)
    first, _ = grouped(rank_of, ranks)
    room = np.zeros(len(lengths), np.int64)  # of the bins of rank r, from first[r] on
    bins = np.zeros(ranks, np.int64)
    found = np.empty(len(lengths), np.int64)
    for at in range(len(lengths)):
        rank = rank_of[at]
        number = 0
        while number < bins[rank] and room[first[rank] + number] < lengths[at]:
            number += 1
        if number == bins[rank]:
            bins[rank] += 1
            room[first[rank] + number] = holds[rank]
        room[first[rank] + number] -= lengths[at]
        found[at] = number
    return found
