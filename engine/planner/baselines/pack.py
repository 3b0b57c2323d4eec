"""Best-fit packing: each item goes into the bin where it leaves the least space."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items, in the given order, into bins whose sizes sum to at most `capacity`; returns each bin's item numbers.

    Every size must be at most `capacity`. For descending sizes, best fit needs at most 11/9 of the fewest possible
    bins, plus one.

    ```
    sizes 5 4 3 2 1, capacity 8:   [5 3] [4 2 1]
    ```
    """
    bins: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (space left, bin), ascending
    for item, size in enumerate(sizes):
        at = bisect_left(spaces, (size, -1))
        if at < len(spaces):
            space, number = spaces.pop(at)
        else:
            space, number = capacity, len(bins)
            bins.append([])
        bins[number].append(item)
        insort(spaces, (space - size, number))
    return bins
