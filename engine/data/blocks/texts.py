"""A source of texts before it is packed: its blocks, how they become tokens, and where these are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.config import schema
from engine.data.cache import cache_folder
from engine.data.parts import Tokens, part_path
from engine.data.sources.source import Block


@dataclass(frozen=True, eq=False)
class Texts:
    """A source of texts."""

    place: str  # for messages
    tokens: Tokens
    folder: Path  # for the token files of its blocks
    blocks: Sequence[Block]

    @classmethod
    def of(cls, data: schema.Data, blocks: Sequence[Block], tokenizer: str | None = None) -> Texts:
        """Take the blocks of a source, and the fingerprint of its tokenizer, if it is known.

        The tokenizer is opened when it is needed; then DataError is raised if it cannot be used.
        """
        return cls(data.path_text, Tokens.of(data, tokenizer), cache_folder(data), blocks)

    def part(self, block: int) -> Path:
        """Return the prefix of the token file of a block."""
        return part_path(self.tokens, self.folder, self.blocks[block])
