"""The Blocks of the planner: blocks of all hosts, whose loaders pack them in the order of need.

```
 ask      which hosts have them?        caller: lengths of all, one call a host; queue.py: what none has
          pack what none has            caller: pack, as many at a time as a host has loaders
 lengths  waits for one of these answers
 resize   tells hosts how many loaders  caller: resize, which answers what they are packing
```
Only lengths come here; tokens go from host to host (slices.py).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from engine.data.blocks.blocks import BlockId, Lengths, Range, Slice, changed
from engine.data.blocks.known import LengthsCache
from engine.data.blocks.served import received_lengths
from engine.data.blocks.texts import Texts
from engine.data.blocks.work import Cost, Queued, joined_costs
from engine.errors import BytescaleError
from engine.remote.caller import Caller, RoleLostError
from engine.remote.queue import Queue
from engine.remote.slices import fetch

_OWNERS = 1 << 16  # blocks whose host is known: many times as many as some steps use


class RayBlocks:
    """Blocks that hosts pack, as a process that packs none sees them."""

    def __init__(self, texts: Mapping[str, Texts], caller: Caller, hosts: Sequence[str], loaders: int) -> None:
        """Take the sources of texts by name, the roles of the hosts, and the number of loaders of all of them."""
        self._texts, self._caller = texts, caller
        self._lock = threading.RLock()
        self._loaders = _divided(loaders, hosts)
        self._queue = Queue(self._loaders)
        self._running = dict[str, list[tuple[str, float]]]()  # of each host, at the last `resize`
        self._resizing = set[str]()  # hosts that have not answered
        self._costs = dict[str, Cost]()  # of what was packed since they were taken, by source
        self._known = LengthsCache()
        self._awaited = dict[BlockId, Future[Lengths]]()
        self._pulling = False
        self.owners = dict[BlockId, str]()  # the host that has packed a block; least recently used first
        self.received = self.tokens = 0  # bytes of lengths; tokens

    def ask(self, wanted: Iterable[BlockId]) -> None:
        with self._lock:
            missing = [block for block in wanted if block not in self.owners]
            self._look(self._queue.ask([*self._awaited, *missing]))
            self._pull()

    def lengths(self, block: BlockId) -> Lengths:
        with self._lock:
            if block in self.owners and (found := self._known.get(block)) is not None:
                self._own(block, self.owners[block])
                return found
            # The answer comes here at once: the cache may have given it up for others by the time that this wakes up.
            awaited = self._awaited.setdefault(block, Future())
            self._look(self._queue.first(block))
            self._pull()
        return awaited.result()

    def slices(self, wanted: Sequence[Range]) -> list[Slice]:
        owners = dict[BlockId, str]()
        for one in wanted:
            block, texts = BlockId(one.source, one.block), self._texts[one.source]
            if one.block >= len(texts.blocks):
                raise changed(block, one.document, [texts.place])
            while (owner := self.owners.get(block)) is None:
                self.lengths(block)
            owners[block] = owner
        found = fetch(self._caller.start, owners, wanted)
        self.tokens += sum(len(one.tokens) for one in found)
        return found

    def keep(self, wanted: Iterable[BlockId]) -> None:
        """Do nothing: ranks map the files of their validation sets, so no block is read for them again."""

    @property
    def loaders(self) -> int:
        """How many loaders there should be on all hosts."""
        with self._lock:
            return sum(self._loaders[host] for host in self._queue.hosts)

    def resize(self, loaders: int) -> None:
        """Set the number of loaders of all hosts together."""
        with self._lock:
            self._loaders = _divided(loaders, self._queue.hosts)
            self._queue.resize(self._loaders)
            self._pull()
            for host in self._queue.hosts:
                self._resize(host)

    def missing(self) -> set[BlockId]:
        """Return the blocks that were asked for, as long as no host is known to have them."""
        with self._lock:
            return self._queue.missing()

    def running(self) -> list[tuple[str, float]]:
        """Return what hosts were packing at the last `resize`, as `Loaders.running`."""
        with self._lock:
            return [one for host in self._queue.hosts for one in self._running.get(host, ())]

    def packed(self) -> dict[str, Cost]:
        """Return what the loaders of all hosts have packed since the last call, by source."""
        with self._lock:
            costs, self._costs = self._costs, {}
        return costs

    def queued(self) -> Queued:
        """Return how many blocks wait for a loader of any host, and how many are being packed."""
        with self._lock:
            return self._queue.queued()

    def close(self) -> None:
        self.ask([])

    def _look(self, blocks: Sequence[BlockId]) -> None:
        """Ask all hosts which of these blocks they have. The caller holds the lock."""
        for host in self._queue.hosts if blocks else []:
            self._caller.start(host, "lengths", blocks).add_done_callback(partial(self._looked, host, blocks))

    def _looked(self, host: str, blocks: Sequence[BlockId], answer: Future[bytes]) -> None:
        """Take the lengths of the blocks that a host has. If it cannot say, it has none; packing raises the error."""
        with self._lock:
            if answer.exception() is None:
                self._take(host, answer.result())
            self._queue.missing_on(host, blocks)
            self._pull()

    def _pull(self) -> None:
        """Let free loaders take blocks. The caller holds the lock."""
        # If a host is lost, its call is answered at once, so this may be called below itself.
        if self._pulling:
            return
        self._pulling = True
        try:
            while (pair := self._queue.take()) is not None:
                host, block = pair
                self._caller.start(host, "pack", block).add_done_callback(partial(self._packed, host, block))
        finally:
            self._pulling = False

    def _resize(self, host: str) -> None:
        """Tell a host its number of loaders, one call at a time: they could overtake each other."""
        if host not in self._resizing:
            self._resizing.add(host)
            count = self._loaders[host]
            self._caller.start(host, "resize", count).add_done_callback(partial(self._resized, host, count))

    def _resized(self, host: str, count: int, answer: Future[list[tuple[str, float]]]) -> None:
        with self._lock:
            self._resizing.discard(host)
            self._running[host] = [] if answer.exception() is not None else answer.result()
            if host in self._queue.hosts and self._loaders[host] != count:
                self._resize(host)

    def _packed(self, host: str, block: BlockId, answer: Future[tuple[bytes, dict[str, Cost]]]) -> None:
        """Take the lengths of a block that a host has packed, or its error, if anyone waits for it."""
        error = answer.exception()
        with self._lock:
            if isinstance(error, RoleLostError):
                self._queue.lose(host)
            elif error is None:
                payload, costs = answer.result()
                self._costs = joined_costs(self._costs, costs)
                self._take(host, payload)
            else:
                self._queue.found(block)
                if (awaited := self._awaited.pop(block, None)) is not None:
                    awaited.set_exception(error if isinstance(error, BytescaleError) else BytescaleError(str(error)))
            self._pull()

    def _take(self, host: str, payload: bytes) -> None:
        """Note the lengths that a host has sent."""
        self.received += len(payload)
        for block, lengths in received_lengths(payload).items():
            self._known.add(block, lengths)
            self._own(block, host)
            self._queue.found(block)
            if (awaited := self._awaited.pop(block, None)) is not None:
                awaited.set_result(lengths)

    def _own(self, block: BlockId, host: str) -> None:
        """Note the host of a block that is used now."""
        self.owners.pop(block, None)
        self.owners[block] = host
        if len(self.owners) > _OWNERS:
            del self.owners[next(iter(self.owners))]


def _divided(loaders: int, hosts: Sequence[str]) -> dict[str, int]:
    """Divide loaders equally among hosts. Each has at least one, for blocks that others ask it to pack again."""
    each, more = divmod(max(loaders, len(hosts)), max(1, len(hosts)))
    return {host: each + (number < more) for number, host in enumerate(hosts)}
