"""Best-fit packing: each item goes into the bin where it leaves the least space."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.compiled import njit
from engine.units import Ints


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items, in the given order, into bins whose sizes sum to at most `capacity`; returns each bin's item numbers.

    Every size must be at most `capacity`. For descending sizes, best fit needs at most 11/9 of the fewest possible
    bins, plus one.

    ```
    sizes 5 4 3 2 1, capacity 8:   [5 3] [4 2 1]
    ```
    """
    bins: list[list[int]] = []
    for item, number in enumerate(best_bins(np.array(sizes, dtype=np.int64), capacity).tolist()):
        if number == len(bins):
            bins.append([])
        bins[number].append(item)
    return bins


@njit
def best_bins(sizes: Ints, capacity: int) -> Ints:
    """Return the bin of each item as `best_fit` packs `sizes` [S], [S]. Bins are numbered as they are opened."""
    found = np.empty(len(sizes), np.int64)
    # The bins in ascending order of the space that they have left, equal ones in the order of their numbers.
    space, number = np.empty(len(sizes), np.int64), np.empty(len(sizes), np.int64)
    bins = 0
    for item in range(len(sizes)):
        low, high = 0, bins
        while low < high:
            middle = (low + high) // 2
            if space[middle] < sizes[item]:
                low = middle + 1
            else:
                high = middle
        if low == bins:
            space[low], number[low] = capacity, bins
            bins += 1
        left, own = space[low] - sizes[item], number[low]
        found[item] = own
        # Move the bin down to its new place.
        while low > 0 and (space[low - 1] > left or (space[low - 1] == left and number[low - 1] > own)):
            space[low], number[low] = space[low - 1], number[low - 1]
            low -= 1
        space[low], number[low] = left, own
    return found
