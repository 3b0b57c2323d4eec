"""The ranks of a ring and their order.

A ring consists of neighbouring ranks and is folded: out over every second rank, and back over the others.

```
 degree 6 from rank 4:   4 -> 6 -> 8 -> 9 -> 7 -> 5 -> 4
```
Every hop goes to a rank at most two away. So a rank has at most four peers over any number of rings, wherever they
start (rule 7 of `verify`). A ring that passes through a node crosses its border once on the way out and once on the way
back: two hops leave the node and two enter it, where a ring in ascending order has one each. This costs nothing in
nodes with two network cards or more.
"""

from __future__ import annotations

import numpy as np

from engine.compiled import njit
from engine.planner.settings import PlanSettings
from engine.units import Ints

HOP = 2  # largest distance of a hop of a folded ring, in ranks


def folded(first: int, degree: int, ranks: int) -> Ints:
    """Return the ranks of a ring in folded order, [degree].

    The ring is on ranks first .. first + degree - 1, modulo the number of ranks `ranks`.
    """
    offsets = np.arange(degree, dtype=np.int64)
    return (first + np.concatenate([offsets[::2], offsets[1::2][::-1]])) % ranks


@njit
def all_folded(first: Ints, degree: Ints) -> tuple[Ints, Ints]:
    """`folded` for S rings with first ranks `first` [S] and degrees `degree` [S].

    The rings must not wrap around after the last rank.
    Returns where each ring begins, [S + 1], and the ranks of all rings, [K].
    """
    start = np.zeros(len(degree) + 1, np.int64)
    for ring in range(len(degree)):
        start[ring + 1] = start[ring] + degree[ring]
    ranks = np.empty(start[-1], np.int64)
    for ring in range(len(degree)):
        for part in range(degree[ring]):
            offset = 2 * part if 2 * part < degree[ring] else 2 * (degree[ring] - part) - 1
            ranks[start[ring] + part] = first[ring] + offset
    return start, ranks


def peers(settings: PlanSettings, hop: int = HOP) -> Ints:
    """Return the ranks at most `hop` away from each rank, in a circle of all ranks, [P, 2 hop]."""
    hops = np.concatenate([np.arange(-hop, 0), np.arange(1, hop + 1)])
    return (np.arange(settings.ranks)[:, None] + hops) % settings.ranks


def least_busy(load: Ints, degree: int) -> int:
    """Return the first of the `degree` neighbouring ranks (modulo all) on which a ring can start the earliest.

    `load` [P] is the time at which each rank is free; a ring starts when all of its ranks are. Among equal starts, the
    ranks that wait the least win, then the lowest first rank.
    """
    # start[i] = max(load[i : i + degree]), by doubling windows: log2(degree) passes.
    start, width = load, 1
    while 2 * width <= degree:
        start = np.maximum(start, np.roll(start, -width))
        width *= 2
    start = np.maximum(start, np.roll(start, width - degree))
    sums = np.concatenate([[0], np.cumsum(np.concatenate([load, load]))])
    busy = sums[degree : degree + len(load)] - sums[: len(load)]
    return int(np.argmax(np.where(start == start.min(), busy, -1)))
