"""The one queue of blocks to pack, in the order of need, from which the loaders of all hosts pull.

```
 asked --> looked for on all hosts --> packed there: found
                                   \\-> nowhere: queued --> taken by the first free loader of any host --> found
```
A block has no host before a loader takes it, so a slow source or host delays only what it has taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from engine.data.blocks.blocks import BlockId
from engine.data.blocks.work import Queued


class Queue:
    """Which blocks wait, in their order, and which host packs which. It does no work itself; callers lock it."""

    def __init__(self, loaders: Mapping[str, int]) -> None:
        """Take the number of loaders of each host."""
        self._free = dict(loaders)
        self._waiting = dict[BlockId, None]()
        self._looking = dict[BlockId, set[str]]()  # the hosts that have not yet said whether they have it
        self._packing = dict[BlockId, str]()

    def resize(self, loaders: Mapping[str, int]) -> None:
        """Set the number of loaders of each host. Those that are too many take no other block."""
        packing = Counter(self._packing.values())
        self._free = {host: loaders[host] - packing[host] for host in self._free}

    @property
    def hosts(self) -> list[str]:
        return [*self._free]

    def ask(self, wanted: Iterable[BlockId]) -> list[BlockId]:
        """Let these blocks wait, in this order, instead of those of the last call; return those to be looked for.

        Those that are being packed are not queued again.
        """
        before = self._waiting
        self._waiting = dict.fromkeys(block for block in wanted if block not in self._packing)
        return self._look_for(block for block in self._waiting if block not in before)

    def first(self, block: BlockId) -> list[BlockId]:
        """Let a block wait before all others; return it if it is to be looked for."""
        if block in self._packing:
            return []
        known = block in self._waiting
        self._waiting = {block: None} | self._waiting
        return [] if known else self._look_for([block])

    def _look_for(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        found = [block for block in blocks if block not in self._looking]
        self._looking |= {block: set(self._free) for block in found}
        return found

    def missing_on(self, host: str, blocks: Iterable[BlockId]) -> None:
        """Note that a host has none of these blocks."""
        for block in blocks:
            hosts = self._looking.get(block, set[str]())
            hosts.discard(host)
            if not hosts:
                self._looking.pop(block, None)

    def found(self, block: BlockId) -> None:
        """Note that a block is packed, wherever it was, or cannot be packed."""
        self._waiting.pop(block, None)
        self._looking.pop(block, None)
        if (host := self._packing.pop(block, None)) in self._free:
            self._free[host] += 1

    def take(self) -> tuple[str, BlockId] | None:
        """Give the first block that no host has to the host with most free loaders; None if either is missing."""
        host = max(self._free, key=self._free.__getitem__, default=None)
        block = next((one for one in self._waiting if one not in self._looking), None)
        if host is None or block is None or self._free[host] < 1:
            return None
        del self._waiting[block]
        self._packing[block] = host
        self._free[host] -= 1
        return host, block

    def missing(self) -> set[BlockId]:
        """Return the blocks that were asked for and that no host is known to have."""
        return {*self._waiting, *self._packing}

    def queued(self) -> Queued:
        """Return how many blocks no host has, and how many of them are being packed."""
        return Queued(sum(block not in self._looking for block in self._waiting), len(self._packing))

    def lose(self, host: str) -> None:
        """Let no loader of a host take blocks any more; what it was packing waits before all others."""
        self._free.pop(host, None)
        lost = [block for block, packer in self._packing.items() if packer == host]
        for block in lost:
            del self._packing[block]
        self._waiting = dict.fromkeys(lost) | self._waiting
        self.missing_on(host, list(self._looking))
