"""Lengths stay in memory, so that steps do not open the blocks of their documents again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from engine.config.load import load
from engine.data.blocks import known
from engine.data.blocks.blocks import BlockId
from engine.data.blocks.known import KnownLengths, LengthsCache
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.packed import Packed
from engine.data.overview import Corpora
from engine.data.sources import jsonl
from engine.data.steps import Cursor


def made(documents: int, runs: int = 0) -> KnownLengths:
    counts, masked = np.zeros(documents, dtype=np.int32), np.zeros((runs, 3), dtype=np.int32)
    return KnownLengths(None, counts, np.zeros(documents, dtype=np.uint64), masked)


def test_blocks_that_were_not_used_for_the_longest_time_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as have more documents and masked runs than may stay; the last one stays, however large."""
    monkeypatch.setattr(known, "_MOST", 10)
    cache, (a, b, c, d) = LengthsCache(), (BlockId("source", number) for number in range(4))
    sizes = {a: made(4), b: made(2, 2), c: made(3)}
    cache.add(a, sizes[a])
    cache.add(a, sizes[a])
    cache.add(b, sizes[b])
    assert cache.get(a) is sizes[a] and cache.get(c) is None
    cache.add(c, sizes[c])
    assert [one in cache for one in (a, b, c)] == [True, False, True] and cache.get(c) is sizes[c]
    cache.add(d, made(11))
    assert [one in cache for one in (a, b, c, d)] == [False, False, False, True]
    cache.add(a, sizes[a])
    assert cache.get(a) is sizes[a] and d not in cache


def test_steps_open_each_block_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several windows, from which each step has documents. To find masks, they opened all of them again."""
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 500)
    rows = [{"ids": [number, 1, 2, 3], "loss_mask": [0, 1, 0, 1]} for number in range(200)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = ["data=jsonl", f"data.path={tmp_path / 'a.jsonl'}", "data.field=ids", f"data.cache={tmp_path / 'cache'}"]
    config = load(["recipe=quickstart", *places, "data.validation_share=0", "batch_tokens=150", "context=16"])
    opened, real = Counter[BlockId](), LocalBlocks.pack_and_open

    def opening(blocks: LocalBlocks, block: BlockId) -> Packed:
        opened[block] += 1
        return real(blocks, block)

    monkeypatch.setattr(LocalBlocks, "pack_and_open", opening)
    monkeypatch.setattr("engine.data.blocks.local_blocks._opened", opening)  # none stays open
    steps, cursor = Corpora(config).steps, Cursor()
    for _ in range(4):
        found = steps.next(cursor)
        assert found is not None
        table, cursor = found
        assert table.loss_tokens.tolist() == [2] * len(table)
    assert len(opened) == steps.corpora[0].blocks > 10 and {*opened.values()} == {1}
