"""Bytes of text that are packed before the first step, of what the step and the validation set need.

    python benchmarks/start.py [SOURCES]

Sources have equal weights and blocks of 1 MiB; a step has 1M tokens of 4 bytes, the validation set 64K tokens, and a
share of 5 % of the documents is for validation. Documents are drawn: nothing is read. Order 1 is that of earlier
versions (`engine/data/order.py`). Columns, in MiB:

- `packed`: the blocks that are packed in advance, and those that the step and the validation set open besides
- `documents`: the documents of the step and of the validation set
- `blocks`: the fewest whole blocks of each source with so many bytes for the step, and so many bytes for validation
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from engine.config.load import load
from engine.data.blocks.blocks import BlockId
from engine.data.corpus import Corpus
from engine.data.order import ORDER
from engine.data.steps import Cursor, Steps
from engine.units import Ints

MIB = 1 << 20
SOURCES = (8, 64, 306)
LENGTHS = {"short": (6.4, 1.0), "long": (7.6, 1.5)}  # logarithm of the tokens of a document: its mean and deviation
TOKEN_BYTES, SHARE = 4, 0.05
MOST = 4  # times the fewest whole blocks


class Drawn:
    """A source of 100,000 blocks of 1 MiB, whose documents have random lengths."""

    def __init__(self, name: str, number: int, lengths: tuple[float, float]) -> None:
        self.name, self.place, self.share, self.blocks = name, name, SHARE, 100_000
        self._number, self._lengths, self.opened = number, lengths, set[int]()
        self.lengths = lru_cache(1024)(self._draw)

    def size(self, block: int) -> int:
        return MIB

    def _draw(self, block: int) -> DrawnLengths:
        self.opened.add(block)
        random = np.random.default_rng((self._number, block))
        drawn = np.clip(random.lognormal(*self._lengths, 2048), 16, MIB / TOKEN_BYTES).astype(np.int64)
        inputs = drawn[: max(1, int(np.searchsorted(np.cumsum(drawn), MIB // TOKEN_BYTES)))]
        return DrawnLengths(inputs, random.integers(0, 2**64, len(inputs), dtype=np.uint64))


class DrawnLengths:
    """The lengths of a block, whose tokens all count in the loss."""

    left_out = None

    def __init__(self, inputs: Ints, hashes: Any) -> None:
        self._inputs, self._hashes = inputs, hashes

    def __len__(self) -> int:
        return len(self._inputs)

    def inputs(self) -> Ints:
        return self._inputs

    def hash(self, first: int = 0, last: int | None = None) -> Any:
        return self._hashes[first:last]

    def runs(self) -> Ints:
        return np.empty((0, 3), dtype=np.int64)


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    for sources in SOURCES:
        for documents in LENGTHS:
            yield f"{sources}/{documents}", partial(rows, sources, documents)


def rows(sources: int, documents: str) -> Iterator[driver.Row]:
    """Yield a row for each order."""
    names = [f"s{number}" for number in range(sources)]
    paths = (f"data.sources.{name}.path={__file__}" for name in names)
    mix = f"data.mix={{{', '.join(f'{name}: 1' for name in names)}}}"
    sizes = ("batch_tokens=1M", "context=64K", "data.validation_tokens=64K", f"data.validation_share={SHARE}")
    config = load(["recipe=quickstart", "data=jsonl", "data.tokenizer=any", *paths, mix, *sizes])
    for order in range(1, ORDER + 1):
        corpora = [Drawn(name, number, LENGTHS[documents]) for number, name in enumerate(names)]
        steps, cursor = Steps(cast(list[Corpus], corpora), config), Cursor(order=order)
        packed = {*steps.upcoming(cursor, config.batch_tokens), *steps.validating(order)}
        found = steps.next(cursor)
        assert found is not None
        table, sets = found[0], steps.validation(order)
        packed |= {BlockId(corpus.name, block) for corpus in corpora for block in corpus.opened}
        trained = TOKEN_BYTES * np.bincount(table.source, table.length, sources)
        validated = np.array([TOKEN_BYTES * sets[name].length.sum() if name in sets else 0 for name in names])
        blocks = np.ceil(trained / MIB).sum() + np.ceil(validated / SHARE / MIB).sum()
        needed = (trained.sum() + validated.sum()) / MIB
        yield {
            "sources": sources,
            "documents": documents,
            "order": order,
            "packed": len(packed),
            "blocks": int(blocks),
            "packed/blocks": len(packed) / blocks,
            "documents_mib": needed,
            "packed/documents": len(packed) / needed,
            "holds": order == 1 or bool(len(packed) <= MOST * blocks),
        }


if __name__ == "__main__":
    sys.exit(driver.main(__doc__, cases))
