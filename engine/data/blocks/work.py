"""Blocks to pack, and what packing costs a loader, as runs and `profile-data --cost` measure it."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from engine.control.processes import children, processor_seconds
from engine.data.parts import Tokens, is_packed, pack_block, part_path
from engine.data.sources.source import Block
from engine.data.token_file import TokenFile
from engine.errors import DataError


class Work(NamedTuple):
    """A block to pack into a folder."""

    tokens: Tokens
    folder: Path
    block: Block
    source: str = ""
    number: int = 0  # of the block in its source

    def part(self) -> Path:
        """Return the prefix of its token file."""
        return part_path(self.tokens, self.folder, self.block)

    def pack(self, wait: bool = True) -> bool:
        """Pack it, as `pack_block`."""
        return pack_block(self.tokens, self.folder, self.block, wait)


class Cost(NamedTuple):
    """The cost of some blocks of a source."""

    blocks: int = 0
    documents: int = 0
    bytes: int = 0  # of the source, as large as its blocks say
    tokens: int = 0
    seconds: float = 0.0  # of processor time, of the loader and of processes that it has started
    memory: int = 0  # bytes: the peak of the loader so far

    def plus(self, other: Cost) -> Cost:
        """Return the cost of the blocks of both."""
        return Cost(
            self.blocks + other.blocks,
            self.documents + other.documents,
            self.bytes + other.bytes,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            max(self.memory, other.memory),
        )


def joined_costs(one: Mapping[str, Cost], other: Mapping[str, Cost]) -> dict[str, Cost]:
    """Return the costs of the blocks of both, by source."""
    return {**one, **{name: one.get(name, Cost()).plus(cost) for name, cost in other.items()}}


class Queued(NamedTuple):
    """How many of the blocks that were asked for are not packed."""

    waiting: int  # for a loader
    packing: int


def pack_and_measure(work: Work) -> tuple[bool, Cost | None]:
    """Pack a block unless another process does; return whether it exists, and what it cost, None if nothing.

    Raises errors as `pack_block` does. Opening the tokenizer does not count: a loader does it once.
    """
    part = work.part()
    if is_packed(part):
        return True, None
    work.tokens.open()
    began = _processor_seconds()
    if not work.pack(wait=False):
        return False, None
    seconds = _processor_seconds() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    with suppress(DataError):  # another run has removed it
        packed = TokenFile.open(part)
        return True, Cost(1, len(packed), work.block.size, packed.tokens, seconds, memory)
    return True, None


def _processor_seconds() -> float:
    """Return the processor time of this process, and of the processes that it has started, such as chat templates'."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    return total + sum(map(processor_seconds, children()))
