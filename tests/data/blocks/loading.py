"""Loaders that pack blocks of three texts, and what is known of these blocks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from engine.data.blocks.loaders import Loaders
from engine.data.blocks.work import Work
from engine.data.parts import Tokens, pack_block, part_path
from engine.data.token_file import TokenFile
from engine.data.tokenizers.load import open_tokenizer
from tests.data.noted import Noted, ends, starts

TOKENS = Tokens("bytes", None, None)
TEXTS = [b"one", b"two", b"three"]
encode = open_tokenizer("bytes").document


@contextmanager
def running(count: int, spool: int = 1 << 40) -> Iterator[Loaders]:
    with closing(Loaders(count, spool)) as loaders:
        yield loaders


def ask(loaders: Loaders, cache: Path, blocks: Sequence[Noted]) -> list[Path]:
    """Ask for blocks, and return the prefixes of their token files."""
    loaders.ask(Work(TOKENS, cache, block) for block in blocks)
    return [part_path(TOKENS, cache, block) for block in blocks]


def contents(part: Path) -> list[list[int]]:
    packed = TokenFile.open(part)
    return [packed.read(number, 0, 99).tolist() for number in range(len(packed))]


def wait_until(condition: Callable[[], bool]) -> None:
    last = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.005)


def packer(block: Noted) -> int:
    """Wait until a loader packs a block, and return its process."""
    wait_until(lambda: starts(block) > ends(block))
    return block.notes()[-1][1]


def sizes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())


def aged(cache: Path, blocks: list[Noted]) -> list[Path]:
    """Pack blocks; the first was used longest ago."""
    parts = [part_path(TOKENS, cache, block) for block in blocks]
    for age, (block, part) in enumerate(zip(blocks, parts, strict=True)):
        pack_block(TOKENS, cache, block)
        for path in part.parent.glob(f"{part.name}*"):
            os.utime(path, (10**9, 10**9))
        os.utime(f"{part}.idx", (10**9 + age, 10**9 + age))
    return parts
