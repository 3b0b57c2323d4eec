"""Compressed rows, compiled: sorting into them in linear time, reading them backward, and whether they are well-formed.

Row i of `items` is items[start[i]] .. items[start[i + 1] - 1]. Kernels that look for a mistake return its first place,
or -1. They trust nothing but what their docstring names, as a kernel does not notice an index out of range.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.compiled import kernel

Ints = NDArray[np.int64]


@kernel
def grouped(keys: Ints, rows: int) -> tuple[Ints, Ints]:
    """Return where each row starts, [rows + 1], and the items by row, in ascending order: items with key i in row i."""
    start = np.zeros(rows + 1, np.int64)
    for key in keys:
        start[key + 1] += 1
    for row in range(rows):
        start[row + 1] += start[row]
    items = np.empty(len(keys), np.int64)
    free = start[:-1].copy()
    for item in range(len(keys)):
        items[free[keys[item]]] = item
        free[keys[item]] += 1
    return start, items


@kernel
def row_of(start: Ints, items: Ints) -> Ints:
    """Return the row that holds each item; each of 0 .. len(items) - 1 is in one."""
    rows = np.empty(len(items), np.int64)
    for row in range(len(start) - 1):
        for place in range(start[row], start[row + 1]):
            rows[items[place]] = row
    return rows


@kernel
def spread(start: Ints) -> Ints:
    """Return the row of each place, [start[-1]]."""
    rows = np.empty(start[-1], np.int64)
    for row in range(len(start) - 1):
        rows[start[row] : start[row + 1]] = row
    return rows


@kernel
def following(start: Ints) -> Ints:
    """Return the next place in the row of each, behind the last the first, [start[-1]]; no row is empty."""
    after = np.arange(1, start[-1] + 1)
    for row in range(len(start) - 1):
        after[start[row + 1] - 1] = start[row]
    return after


@kernel
def short_row(start: Ints, end: int, least: int) -> int:
    """Return the first row that is shorter than `least` or goes beyond `end`; start[0] is 0."""
    wrong = 0
    for row in range(len(start) - 1):  # without a way out, so that several are compared at a time
        wrong += int(start[row + 1] > end) + int(start[row + 1] < start[row] + least)
    if wrong > 0:
        for row in range(len(start) - 1):
            if start[row + 1] > end or start[row + 1] < start[row] + least:
                return row
    return -1


@kernel
def out_of_range(values: Ints, low: int, high: int) -> int:
    """Return the first place whose value is not in low .. high - 1."""
    least, most = high - 1, low
    for value in values:  # without a way out, so that several are compared at a time
        least, most = min(least, value), max(most, value)
    if least >= low and most < high:
        return -1
    for place in range(len(values)):
        if values[place] < low or values[place] >= high:
            return place
    return -1
