"""Which ranks a ring lies on, and in which order.

A ring lies on neighbouring ranks and is folded: out over every second rank, and back over the others.

```
 degree 6 from rank 4:   4 -> 6 -> 8 -> 9 -> 7 -> 5 -> 4
```
Every hop goes to a rank at most two away, so over any number of rings, wherever they start, a rank has at most four
peers (rule 7). A border between two nodes is crossed once on the way out and once on the way back: two hops leave a
node that the ring passes through, and two enter it, where a ring in ascending order has one of each. That costs
nothing where a node has two network cards or more.
"""

from __future__ import annotations

import numpy as np

from engine.planner.plan import Ints


def folded(first: int, degree: int, ranks: int) -> Ints:
    """Return the ring on `degree` neighbouring ranks from `first` on, modulo `ranks`."""
    offsets = np.arange(degree, dtype=np.int64)
    return (first + np.concatenate([offsets[::2], offsets[1::2][::-1]])) % ranks


def all_folded(first: Ints, degree: Ints) -> tuple[Ints, Ints]:
    """Return where rings begin, [S + 1], and all their ranks, [K]: `folded` for many, none around the end."""
    start = np.concatenate([[0], np.cumsum(degree)])
    ring = np.repeat(np.arange(len(degree)), degree)
    part = np.arange(start[-1]) - start[:-1][ring]
    out = part < (degree[ring] + 1) // 2
    return start, first[ring] + np.where(out, 2 * part, 2 * (degree[ring] - part) - 1)


def least_busy(load: Ints, degree: int) -> int:
    """Return the first of the `degree` neighbouring ranks (modulo all) that are free the earliest.

    Free is when the busiest of them is. Among equal ones those that wait the least, then the lowest first rank.
    """
    free = _window_max(load, degree)
    sums = np.concatenate([[0], np.cumsum(np.concatenate([load, load]))])
    busy = sums[degree : degree + len(load)] - sums[: len(load)]
    return int(np.argmax(np.where(free == free.min(), busy, -1)))


def _window_max(load: Ints, degree: int) -> Ints:
    """Return the largest load of ranks i .. i + degree - 1, [P]. Doubles the window, so it takes log(degree) passes."""
    largest, width = load, 1
    while 2 * width <= degree:
        largest = np.maximum(largest, np.roll(largest, -width))
        width *= 2
    return np.maximum(largest, np.roll(largest, width - degree))
