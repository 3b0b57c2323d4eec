"""Token files of tests, and how they were made."""

from __future__ import annotations

from pathlib import Path

from engine.data.parts import Tokens
from engine.data.token_file import TokenFile

TOKENS = Tokens("bytes", None, None)


def documents(prefix: Path) -> list[list[int]]:
    packed = TokenFile.open(prefix)
    return [packed.read(number, 0, 10_000).tolist() for number in range(len(packed))]
