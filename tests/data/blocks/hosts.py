"""Hosts with a cache each, all in this process, which ask each other over real sockets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from engine.control.sockets import reserved
from engine.data.blocks.blocks import BlockId
from engine.data.blocks.loaders import Loaders
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.peer_blocks import PeerBlocks
from engine.data.blocks.peers import Hosts
from engine.data.blocks.texts import Texts

SECRET = b"of the run"


class Host(PeerBlocks):
    """The blocks of a host; with it, all close."""

    several: Several

    def close(self) -> None:
        for one in self.several.blocks:
            PeerBlocks.close(one)


class Several:
    """The blocks of several hosts."""

    def __init__(
        self,
        texts: Mapping[str, Texts],
        count: int,
        loaders: int = 0,
        placed: Mapping[BlockId, str] | None = None,
        secrets: tuple[bytes, ...] = (),
        named: bool = False,
    ) -> None:
        """`named`: errors have the names of the hosts, which are those of their caches."""
        self.identities = [f"cache {number}" for number in range(count)]
        sockets = [reserved("127.0.0.1") for _ in range(count)]
        places = {name: socket.getsockname()[:2] for name, socket in zip(self.identities, sockets, strict=True)}
        self.caches = list[Path]()
        self.blocks = list[PeerBlocks]()
        for number, name in enumerate(self.identities):
            secret = secrets[number] if secrets else SECRET
            others = {one: place for one, place in places.items() if one != name}
            own = {source: replace(one, folder=one.folder / name) for source, one in texts.items()}
            self.caches.append(next(iter(own.values())).folder)
            local = LocalBlocks(own, Loaders(loaders, 1 << 40) if loaders else None, name if named else None)
            found = Host(own, local, Hosts(name, *places[name], secret, others), placed or {})
            found.several = self
            self.blocks.append(found)
        for socket in sockets:
            socket.close()

    def packed(self, number: int) -> set[str]:
        """The names of the blocks in the cache of a host."""
        return {path.stem for path in self.caches[number].rglob("*.idx")}


@contextmanager
def several(texts: Mapping[str, Texts], count: int, **more: object) -> Iterator[Several]:
    with ExitStack() as stack:
        found = Several(texts, count, **more)  # type: ignore[arg-type]
        stack.callback(found.blocks[0].close)
        yield found
