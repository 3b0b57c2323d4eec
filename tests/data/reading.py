"""Sources of texts with their local blocks, and their documents: for tests that need no config."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.config import schema
from engine.data.blocks.blocks import BlockId, Range, Slice
from engine.data.blocks.loaders import Loaders
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.packed import Packed
from engine.data.blocks.texts import Texts
from engine.data.corpus import Corpus, TextCorpus
from engine.data.sources.source import Block

END = 1 << 40  # after the last token of any document


def text_corpus(
    data: schema.Data, blocks: Sequence[Block], share: float = 0.0, name: str = "data", loaders: Loaders | None = None
) -> TextCorpus:
    """A source of texts whose blocks this process packs, or loaders do."""
    found = Texts.of(data, blocks)
    return TextCorpus(name, share, found, LocalBlocks({name: found}, loaders))


def packed(corpus: TextCorpus, block: int) -> Packed:
    """Open a block again, whether or not it is open."""
    assert isinstance(corpus.store, LocalBlocks)
    return corpus.store.pack_and_open(BlockId(corpus.name, block))


def range_of(corpus: Corpus, block: int, document: int, start: int = 0, stop: int = END) -> Range:
    """Some tokens of a document, as it is now."""
    (content,) = corpus.lengths(block).hash(document, document + 1).tolist()
    return Range(corpus.name, block, document, start, stop, content)


def read(corpus: Corpus, block: int, document: int, start: int = 0, stop: int = END) -> Slice:
    """Read some tokens of a document, as it is now."""
    (found,) = corpus.slices([range_of(corpus, block, document, start, stop)])
    return found


def tokens(corpus: Corpus, block: int, document: int) -> list[int]:
    """All tokens of a document."""
    return read(corpus, block, document).tokens.tolist()


def counts(corpus: Corpus) -> NDArray[np.int64]:
    """The inputs of all documents."""
    return np.concatenate([corpus.lengths(block).inputs() for block in range(corpus.blocks)])
