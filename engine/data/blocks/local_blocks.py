"""The blocks of texts of this host: token files in `data.cache`, which are packed when they are first needed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache

from engine.data.blocks.blocks import BlockId, Range, Slice, changed
from engine.data.blocks.known import KnownLengths, LengthsCache
from engine.data.blocks.loaders import Loaders
from engine.data.blocks.packed import Packed
from engine.data.blocks.texts import Texts
from engine.data.blocks.work import Cost, Work
from engine.data.cache import ENDINGS
from engine.data.host_files import on_host
from engine.data.parts import OTHERS, is_packed, read_left_out
from engine.data.token_facts import hashes_path
from engine.data.token_file import Numbers, TokenFile
from engine.errors import DataError, StorageError

_OPENED = 128  # blocks that a process keeps open
_ATTEMPTS = 5  # to open a block that other runs remove


class LocalBlocks:
    """The Blocks of a process. With loaders, those pack ahead; without, each block is packed when it is needed."""

    def __init__(self, texts: Mapping[str, Texts], loaders: Loaders | None = None, host: str | None = None) -> None:
        """Take the sources of texts by name. The loaders are closed with this object.

        `host` is the name of this host for the errors of its blocks, if the run has several.
        """
        self._texts, self._loaders, self._host = texts, loaders, host
        self._known = LengthsCache()

    def ask(self, wanted: Iterable[BlockId]) -> None:
        if self._loaders is not None:
            self._loaders.ask(map(self._work, wanted))

    def lengths(self, block: BlockId) -> KnownLengths:
        if (found := self._known.get(block)) is None:
            found = KnownLengths.of(self._open(block))
            self._known.add(block, found)
        return found

    def slices(self, wanted: Sequence[Range]) -> list[Slice]:
        return [self._slice(one) for one in wanted]

    def keep(self, wanted: Iterable[BlockId]) -> None:
        if self._loaders is not None:
            self._loaders.keep(map(self._work, wanted))

    def close(self) -> None:
        if self._loaders is not None:
            self._loaders.close()

    def packed(self) -> dict[str, Cost]:
        """Return what loaders have packed since the last call, by source."""
        return {} if self._loaders is None else self._loaders.packed()

    def missing(self) -> set[BlockId]:
        """Return the blocks that loaders are to pack, or are packing."""
        return set() if self._loaders is None else {BlockId(one.source, one.number) for one in self._loaders.missing()}

    def running(self) -> list[tuple[str, float]]:
        """Return the source of each block that is being packed, and processor seconds so far; see Loaders.running."""
        return [] if self._loaders is None else self._loaders.running()

    @property
    def loaders(self) -> int:
        """The number of loaders."""
        return 0 if self._loaders is None else self._loaders.count

    def resize(self, loaders: int) -> None:
        """Set the number of loaders, if there are any."""
        if self._loaders is not None:
            self._loaders.resize(loaders)

    def _work(self, block: BlockId) -> Work:
        texts = self._texts[block.source]
        return Work(texts.tokens, texts.folder, texts.blocks[block.block], block.source, block.block)

    def _slice(self, wanted: Range) -> Slice:
        block, texts = BlockId(wanted.source, wanted.block), self._texts[wanted.source]
        if block.block >= len(texts.blocks):
            raise changed(block, wanted.document, [texts.place])
        return self._open(block).read(wanted, texts.blocks[block.block].files)

    def _open(self, block: BlockId) -> Packed:
        with on_host(self._host, block.source):
            return _opened(self, block)

    def is_packed(self, block: BlockId) -> bool:
        """Return whether a block is packed; False also for one that does not exist, or whose files do not."""
        texts = self._texts[block.source]
        with suppress(DataError):
            return block.block < len(texts.blocks) and is_packed(texts.part(block.block))
        return False

    def begin(self, wanted: Iterable[BlockId]) -> None:
        """Let loaders pack these blocks next, before those of the last `ask`."""
        if self._loaders is not None:
            for block in wanted:
                self._loaders.add(self._work(block))

    def coming(self, block: BlockId, seconds: float) -> bool:
        """Return whether loaders are to pack a block, or are packing it; first wait for that, at most some seconds."""
        with suppress(DataError):
            part = self._texts[block.source].part(block.block)
            return self._loaders is not None and not self._loaders.wait(part, seconds)
        return False

    def pack_and_open(self, block: BlockId) -> Packed:
        """Open a block, which is packed first if it is not yet."""
        work, part = self._work(block), self._texts[block.source].part(block.block)
        for attempt in range(1, _ATTEMPTS + 1):
            if not is_packed(part):
                if self._loaders is not None:
                    self._loaders.wait(part)
                work.pack()
            try:
                tokens, left_out = TokenFile.open(part), read_left_out(part)
                packed = Packed(tokens, Numbers(hashes_path(part)), 0, len(tokens), left_out)
            except DataError as error:
                if isinstance(error.__cause__, PermissionError):
                    raise StorageError("cannot be read: Permission denied", key=str(part), hint=OTHERS) from error
                if attempt == _ATTEMPTS and is_packed(part):
                    raise
                continue  # another run removes it (spool.py) just now, or has removed it and packed it again
            if is_packed(part):  # so no file was removed before it was opened
                break
        else:
            message = f"was removed {_ATTEMPTS} times by other runs before it could be read"
            raise StorageError(message, key=str(part), hint="let runs with another data.spool use another data.cache")
        for ending in ENDINGS:  # all of them: programs that tidy up a disk go by the age of each file
            with suppress(OSError):  # there is no mask, or this user cannot write to the folder
                os.utime(f"{part}{ending}")
        return packed


@lru_cache(_OPENED)  # of all sources together: each has up to four open files
def _opened(blocks: LocalBlocks, block: BlockId) -> Packed:
    return blocks.pack_and_open(block)
