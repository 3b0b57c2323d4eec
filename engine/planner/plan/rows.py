"""Compressed rows, where row i of `items` is items[start[i] : start[i + 1]]: building them and checking `start`."""

from __future__ import annotations

import numpy as np

from engine.compiled import njit
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


def row_of_each(start: Ints) -> Ints:
    """Return the row number of each item, [start[-1]]."""
    return np.repeat(np.arange(len(start) - 1), np.diff(start))


def first_true(values: Bools) -> int:
    """Return the first index that is True, or -1."""
    return int(values.argmax()) if values.any() else -1


def first_short_row(start: Ints, end: int, least: int) -> int:
    """Return the first row with fewer than `least` items or with items beyond `end`, or -1. start[0] must be 0."""
    # Not by np.diff: starts may be any integers here, and differences of huge ones overflow.
    return first_true((start[1:] > end) | (start[1:] < start[:-1] + least))


def first_out_of_range(values: Ints, low: int, high: int) -> int:
    """Return the first index whose value is not in low .. high - 1, or -1."""
    return first_true((values < low) | (values >= high))
