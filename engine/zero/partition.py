"""Where the elements of each parameter are in the flat tensors of the ranks: fp32 master weights, moments.

DeepSpeed stores the parameters of a group (of a sub-group in stage 3) in one flat tensor per rank:

| stage | three parameters a, b, c on two ranks | padding |
|---|---|---|
| 1, 2 | `aaaab` and `bbc0`: concatenated, then cut into equal lengths | at the end of the group |
| 3 | `aabbc` and `aab00`: each parameter is cut into equal lengths | at the end of each parameter |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where one parameter is stored: element e is on rank `(first + e) // length`, at `base + (first + e) % length`."""

    group: int  # index of the flat tensor on each rank
    size: int  # elements of the parameter
    first: int
    length: int
    base: int

    def on_rank(self, rank: int) -> tuple[int, int, int]:
        """Return the range [start, stop) of elements that a rank stores, and where it starts in the flat tensor.

        If the rank stores none, `stop` is not greater than `start`.
        """
        start = max(0, rank * self.length - self.first)
        stop = min(self.size, (rank + 1) * self.length - self.first)
        return start, stop, self.base + self.first + start - rank * self.length

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the rank, the start in its flat tensor and the number of elements, for elements [start, stop)."""
        at, end = self.first + start, self.first + stop
        while at < end:
            rank, inside = divmod(at, self.length)
            count = min(self.length - inside, end - at)
            yield rank, self.base + inside, count
            at += count


def places(groups: Sequence[Mapping[str, int]], lengths: Sequence[int], stage: int, ranks: int) -> dict[str, Place]:
    """Return the place of each parameter.

    `groups` are the numbers of elements by name, in the order of the flat tensors, and `lengths` the lengths of a
    rank's flat tensors.
    """
    found = {}
    for group, (sizes, length) in enumerate(zip(groups, lengths, strict=True)):
        at = 0
        for name, size in sizes.items():
            shard = -(-size // ranks)
            found[name] = Place(group, size, 0, shard, at) if stage == 3 else Place(group, size, at, length, 0)
            at += shard if stage == 3 else size
    return found
