"""Compressed rows, where row i of `items` is items[start[i] : start[i + 1]]: building and checking them; sorting."""

from __future__ import annotations

import numpy as np

from engine.compiled import njit, njit_in_place
from engine.units import Bools, Ints


@njit
def grouped(keys: Ints, rows: int) -> tuple[Ints, Ints]:
    """Group items by key, in linear time: item i goes to row keys[i], and rows keep the order of items.

    Returns `start` [rows + 1] and `items` [len(keys)]. Keys must be in 0 .. rows - 1; this is not checked.
    """
    start = np.zeros(rows + 1, np.int64)
    for key in keys:
        start[key + 1] += 1
    for row in range(rows):
        start[row + 1] += start[row]
    items = np.empty(len(keys), np.int64)
    end = start[:-1].copy()  # by row: where its next item goes
    for item in range(len(keys)):
        items[end[keys[item]]] = item
        end[keys[item]] += 1
    return start, items


@njit
def row_of_each(start: Ints) -> Ints:
    """Return the row number of each item, [start[-1]]."""
    rows = np.empty(start[-1], np.int64)
    for row in range(len(start) - 1):
        for item in range(start[row], start[row + 1]):
            rows[item] = row
    return rows


@njit
def hops(start: Ints, steps: Ints) -> Ints:
    """Return for each item the one that is steps[i] places further in its row i, around its end, [start[-1]]."""
    further = np.arange(start[-1])
    for row in range(len(start) - 1):
        first, size = start[row], start[row + 1] - start[row]
        if size > 1:
            for item in range(first, start[row + 1]):
                further[item] = first + (item - first + steps[row]) % size
    return further


@njit
def ascending(keys: Ints) -> Ints:
    """Return the order in which `keys` [N] ascend; equal keys keep their order. For keys whose differences fit 63 bits.

    A radix sort, which takes linear time: one pass for each digit, the lowest one first.
    """
    bits = 11 if len(keys) > 1024 else 8
    order, sorted_ = np.arange(len(keys)), np.empty(len(keys), np.int64)
    if len(keys) == 0:
        return order
    least, most = keys.min(), keys.max()
    begin = np.empty((1 << bits) + 1, np.int64)  # by digit: where its next key goes
    shift = 0
    while shift < 63 and (most - least) >> shift > 0:
        begin[:] = 0
        for key in keys:
            begin[((key - least) >> shift & (1 << bits) - 1) + 1] += 1
        for digit in range(1 << bits):
            begin[digit + 1] += begin[digit]
        for at in order:
            digit = (keys[at] - least) >> shift & (1 << bits) - 1
            sorted_[begin[digit]] = at
            begin[digit] += 1
        order, sorted_ = sorted_, order
        shift += bits
    return order


@njit_in_place
def first_true(values: Bools) -> int:
    """Return the first index that is True, or -1."""
    for at in range(len(values)):
        if values[at]:
            return at
    return -1


@njit_in_place
def first_short_row(start: Ints, end: int, least: int) -> int:
    """Return the first row with fewer than `least` items or with items beyond `end`, or -1. start[0] must be 0."""
    # Starts may be any integers here. No sum overflows before the first row that is reported.
    for row in range(len(start) - 1):
        if start[row + 1] > end or start[row + 1] < start[row] + least:
            return row
    return -1


@njit_in_place
def first_out_of_range(values: Ints, low: int, high: int) -> int:
    """Return the first index whose value is not in low .. high - 1, or -1."""
    least, most = high - 1, low
    for value in values:  # without a way out, so that the processor compares several at once
        least, most = min(least, value), max(most, value)
    if least >= low and most < high:
        return -1
    for at in range(len(values)):
        if values[at] < low or values[at] >= high:
            return at
    return -1
