"""Stack rings in columns of ranks, in descending order of length, each column up to a limit. For pipelines.

```
 limit |.................................   32, of which bubbles take 9 or 8 (two stages)
       | [7: 4 ]      [6: 5 ]
       |              [5: 5 ]                [ring: time]
       | [2: 8       ][4: 6    ]             a ring goes on the newest column that then stays below
       | [1: 9       ][3: 8    ]             the limit, or on empty ranks; a column that is wider
       +----------------------------------   than the ring is split
         0  1  2  3   4  5  6  7  8  9 ranks
```
Columns split and never join. So all ranks of a ring have run the same number of rings before it, its micro-batch has
the same place on all of them, and 1F1B cannot deadlock (planner/plan/order.py).

A pipeline of n stages that runs micro-batches of descending times t is done after (sum t + (n - 1) max t) / n. The
height of a column is n times that: a long micro-batch pays for the bubbles around it.
Letters: R rings, P ranks, n stages. Times are whole ns, of all stages together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import njit
from engine.cost.times import Rates
from engine.planner.time.bound import ring_time
from engine.units import Ints


class Stack(NamedTuple):
    """Stacked rings. `first` is empty if they do not fit."""

    first: Ints  # [R] first rank
    load: Ints  # [P] time of a rank's rings
    longest: Ints  # [P] time of its longest ring


class _Columns(NamedTuple):
    """Columns, the newest last. A column that was split up completely has width 0."""

    start: Ints  # first rank
    width: Ints  # ranks
    load: Ints  # time of its rings
    longest: Ints  # time of its longest ring


@njit
def ring_times(rates: Rates, lengths: Ints, degrees: Ints, node: int) -> Ints:
    """Time of a micro-batch that holds only this ring, with transfers, for each of R rings, [R].

    A ring of at most `node` ranks is inside a node.
    """
    times = np.empty(len(lengths), np.int64)
    for ring in range(len(lengths)):
        time = ring_time(rates, float(lengths[ring]), degrees[ring], node, 0.0)
        times[ring] = np.int64(time + rates.micro + 0.5)
    return times


@njit
def stacked(times: Ints, degrees: Ints, node_of: Ints, stages: int, limit: int) -> Stack:
    """Stack rings with `times` [R] and `degrees` [R], which must descend, in columns of at most `limit` ns.

    `node_of` [P] is the node of each rank. An empty column takes a ring of any time, because no place would be better.
    Returns empty arrays if a ring does not fit.
    """
    ranks, waits = len(node_of), stages - 1
    rows = np.zeros((4, 2 * ranks + 1), np.int64)
    columns, count = _Columns(rows[0], rows[1], rows[2], rows[3]), 1
    columns.width[0] = ranks
    first = np.empty(len(times), np.int64)
    for ring in range(len(times)):
        at = _fitting(columns, count, times[ring], degrees[ring], waits, limit)
        if at < 0:
            return Stack(first[:0], first[:0], first[:0])
        if columns.width[at] > degrees[ring]:
            count = _split(columns, count, at, degrees[ring], node_of)
            at = count - 1
        first[ring] = columns.start[at]
        columns.load[at] += times[ring]
        columns.longest[at] = max(columns.longest[at], times[ring])
    load, longest = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    for at in range(count):
        end = columns.start[at] + columns.width[at]
        load[columns.start[at] : end], longest[columns.start[at] : end] = columns.load[at], columns.longest[at]
    return Stack(first, load, longest)


@njit
def _fitting(columns: _Columns, count: int, time: int, degree: int, waits: int, limit: int) -> int:
    """Index of the newest column with room for a ring, or -1. The newest column has the rings most similar to it.

    `waits` is stages - 1: the number of times that the longest ring counts as bubbles.
    """
    for at in range(count - 1, -1, -1):
        if columns.width[at] >= degree:
            height = columns.load[at] + time + waits * max(columns.longest[at], time)
            if height <= limit or columns.load[at] == 0:
                return at
    return -1


@njit
def _split(columns: _Columns, count: int, at: int, degree: int, node_of: Ints) -> int:
    """Split `degree` ranks off column `at` as the newest column, inside a node if possible; returns the new `count`."""
    start, end = columns.start[at], columns.start[at] + columns.width[at]
    border = start
    while border < end and node_of[border] == node_of[start]:
        border += 1
    inside = border + degree <= end and node_of[border] == node_of[border + degree - 1]
    begin = border if border < start + degree and inside else start
    for a, b in ((start, begin), (begin, begin + degree)):
        columns.start[count], columns.width[count] = a, b - a
        columns.load[count], columns.longest[count] = columns.load[at], columns.longest[at]
        count += b > a
    columns.start[at], columns.width[at] = begin + degree, end - begin - degree
    return count
