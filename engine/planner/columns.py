"""Rings stacked in columns of ranks, one level of length after the other, each column up to a limit. For pipelines.

```
 limit |.................................   32, of which bubbles take 9 or 8 (two stages)
       | [7: 4 ]      [6: 5 ]
       |              [5: 5 ]                ring: time
       | [2: 8       ][4: 6    ]             a ring goes on the newest column that stays below
       | [1: 9       ][3: 8    ]             the limit, or opens one; a column that is too wide
       +----------------------------------   for it is split
         0  1  2  3   4  5  6  7  8  9 ranks
```
Columns only split, they never join. So all ranks of a ring have run as many rings before it, its micro-batch has one
place on all of them, and 1F1B cannot deadlock (planner/order.py, `_moments`).

A line of n stages that runs micro-batches of times t, which fall, is done after (sum t + (n - 1) max t) / n. The height
of a column is n times that: a long micro-batch is charged for the bubbles around it.
Letters: R rings, P ranks, n stages. Times are whole ns, of all stages together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import kernel
from engine.cost.times import Rates
from engine.planner.bound import ring_time
from engine.planner.plan import Ints


class Stack(NamedTuple):
    """Where rings lie, by first rank, [R], or nothing if they do not fit; and each rank's rings, [P]."""

    first: Ints
    load: Ints  # their sum
    longest: Ints


class _Columns(NamedTuple):
    """Columns, the newest last; some are of no width any more."""

    start: Ints
    width: Ints
    load: Ints
    longest: Ints


@kernel
def ring_times(rates: Rates, lengths: Ints, degrees: Ints, node: int) -> Ints:
    """Return the time of a micro-batch that is one ring, transfers included, of each of R rings."""
    times = np.empty(len(lengths), np.int64)
    for ring in range(len(lengths)):
        time = ring_time(rates, float(lengths[ring]), degrees[ring], node, 0.0)
        times[ring] = np.int64(time + rates.micro + 0.5)
    return times


@kernel
def stacked(times: Ints, degrees: Ints, node_of: Ints, stages: int, limit: int) -> Stack:
    """Return rings in columns; `degrees` [R] must not rise, and `node_of` [P] is the node of each rank.

    A ring may open a column whatever its height: it would be as high anywhere.
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


@kernel
def _fitting(columns: _Columns, count: int, time: int, degree: int, waits: int, limit: int) -> int:
    """Return the newest column that takes a ring, or -1: levels fall, so the newest is the nearest."""
    for at in range(count - 1, -1, -1):
        if columns.width[at] >= degree:
            height = columns.load[at] + time + waits * max(columns.longest[at], time)
            if height <= limit or columns.load[at] == 0:
                return at
    return -1


@kernel
def _split(columns: _Columns, count: int, at: int, degree: int, node_of: Ints) -> int:
    """Cut a column so that the last one is of `degree` ranks, inside a node if it can be; return the new count."""
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
