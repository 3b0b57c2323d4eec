"""Best-fit packing: each item goes where it leaves the least room."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Return bins of item numbers, each of summed size at most `capacity`; items come in the order given.

    Best fit of items in descending order needs at most 11/9 of the least number of bins, plus one. Every size is at
    most `capacity`.

    ```
    sizes 5 4 3 2 1, capacity 8:   [5 3] [4 2 1]
    ```
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, bin), ascending
    for item, size in enumerate(sizes):
        at = bisect_left(rooms, (size, -1))
        if at < len(rooms):
            room, number = rooms.pop(at)
        else:
            room, number = capacity, len(bins)
            bins.append([])
        bins[number].append(item)
        insort(rooms, (room - size, number))
    return bins
