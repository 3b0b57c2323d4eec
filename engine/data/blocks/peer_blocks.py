"""The blocks of texts of several hosts without a shared cache: each is packed by one of them, its owner.

```
 ask([a, b, c, d])    host 0 owns a, c: its loaders pack them     host 1 owns b, d
 lengths(b)           from host 1 (peers.py)                      from its own cache
 slices([a, b])       a from its own cache, b from host 1         a from host 0
```
All hosts plan the same steps, so each knows what is needed next, and packs what it owns in that order. A block whose
owner is late or gone is packed by each host that needs it: the content is the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from hashlib import blake2b

from engine.data.blocks.blocks import BlockId, Lengths, Range, Slice
from engine.data.blocks.known import LengthsCache
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.peers import Hosts, Peer, PeerServer
from engine.data.blocks.texts import Texts

_OWNERS = 1 << 16  # blocks whose owner is not computed again
_TOGETHER = 256  # blocks whose lengths are asked for at once
_AT_ONCE = 64  # hosts that are asked for tokens at once


class PeerBlocks:
    """The Blocks of the planning process of a host."""

    def __init__(
        self, texts: Mapping[str, Texts], local: LocalBlocks, hosts: Hosts, placed: Mapping[BlockId, str]
    ) -> None:
        """Take the sources of texts, the blocks of this host, and the other hosts. Begins to listen to them.

        `placed` are blocks that the cache with an identity already has. `local` is closed with this object.
        Raises OSError.
        """
        self._texts, self._local, self._own, self._placed = texts, local, hosts.identity, placed
        self._peers = {one: Peer(place, hosts.secret) for one, place in hosts.others.items()}
        self.owner = lru_cache(_OWNERS)(self._owner)
        self._known = LengthsCache()  # of blocks of other hosts
        self._asked: Sequence[BlockId] = ()
        self._late = set[Peer]()  # hosts whose blocks this one packs ahead
        self._closed = False
        self._server = PeerServer(local, hosts)

    def _owner(self, block: BlockId) -> str:
        """Return the identity of the cache that a block belongs to: the one with the largest hash of both.

        So if a host leaves or joins, only the blocks that it has or gets change their owner.
        """
        found = self._placed.get(block)
        if found not in (self._own, *self._peers):
            signature = self._texts[block.source].blocks[block.block].signature
            key = blake2b(signature.encode("utf-8", "surrogateescape")).digest()
            ranked = {one: blake2b(one.encode(), key=key).digest() for one in (self._own, *self._peers)}
            found = max(ranked, key=lambda one: ranked[one])
        assert found is not None
        return found

    def ask(self, wanted: Iterable[BlockId]) -> None:
        self._asked = [*wanted]
        self._pack_ahead()

    def lengths(self, block: BlockId) -> Lengths:
        if (found := self._known.get(block)) is not None:
            return found
        if (peer := self._elsewhere(block)) is None:
            return self._local.lengths(block)
        others = [one for one in self._asked if one != block and one not in self._known and self._peer(one) is peer]
        answered = peer.lengths([block, *others[: _TOGETHER - 1]])
        for one, lengths in answered.items():
            self._known.add(one, lengths)
        self._look_at([peer])
        return answered[block] if block in answered else self._local.lengths(block)

    def slices(self, wanted: Sequence[Range]) -> list[Slice]:
        numbers_at, here = defaultdict[Peer, list[int]](list), list[int]()
        peers = {block: self._elsewhere(block) for block in {BlockId(one.source, one.block) for one in wanted}}
        for number, one in enumerate(wanted):
            peer = peers[BlockId(one.source, one.block)]
            (here if peer is None else numbers_at[peer]).append(number)
        found = dict[int, Slice]()
        if numbers_at:
            with ThreadPoolExecutor(min(_AT_ONCE, len(numbers_at))) as pool:
                asked = [[wanted[number] for number in numbers] for numbers in numbers_at.values()]
                answers = pool.map(Peer.slices, numbers_at, asked)
                for numbers, answered in zip(numbers_at.values(), answers, strict=True):
                    found |= {number: one for number, one in zip(numbers, answered, strict=True) if one is not None}
                    here += [number for number, one in zip(numbers, answered, strict=True) if one is None]
            self._look_at(numbers_at)
        found |= zip(here, self._local.slices([wanted[number] for number in here]), strict=True)
        return [found[number] for number in range(len(wanted))]

    def keep(self, wanted: Iterable[BlockId]) -> None:
        self._local.keep(block for block in wanted if self._peer(block) is None)

    def close(self) -> None:
        self._closed = True
        self._server.close()
        for peer in self._peers.values():
            peer.close()
        self._local.close()

    def _peer(self, block: BlockId) -> Peer | None:
        """Return the host that owns a block; None if this one does, or there is no such block."""
        if self._closed or block.block >= len(self._texts[block.source].blocks):
            return None
        return self._peers.get(self.owner(block))

    def _elsewhere(self, block: BlockId) -> Peer | None:
        """Return the host to read a block from; None if this one has it, or the host is late."""
        peer = self._peer(block)
        return None if peer is None or peer.is_late or self._local.is_packed(block) else peer

    def _look_at(self, peers: Iterable[Peer]) -> None:
        """Pack ahead the blocks of those of the hosts that have become late."""
        if any(peer.is_late and peer not in self._late for peer in peers):
            self._pack_ahead()

    def _pack_ahead(self) -> None:
        """Let the loaders of this host pack what it owns of what was asked for, and what hosts own that are late."""
        self._late = {peer for peer in self._peers.values() if peer.is_late}
        peers = ((block, self._peer(block)) for block in self._asked)
        self._local.ask(block for block, peer in peers if peer is None or peer in self._late)
