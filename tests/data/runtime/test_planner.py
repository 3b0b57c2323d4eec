"""Planning needs lengths alone, whichever process has packed the blocks."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.data.blocks.blocks import BlockId, Range, Slice
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.texts import Texts
from engine.data.opening import MakeBlocks, list_blocks, open_sources
from engine.data.pack import pack
from engine.data.runtime.planner import StepPlanner, received_sets, received_step
from engine.data.sources import jsonl
from engine.data.steps import Cursor
from engine.job import Job
from engine.units import Ints
from tests.data.memory import MemoryLengths, same

STEPS = 12


class Sent(MemoryLengths):
    """Lengths of a block as another host sends them: inputs, hashes, runs of masked tokens, what was left out."""

    def __init__(self, blocks: LocalBlocks, block: BlockId) -> None:
        found = blocks.lengths(block)
        super().__init__(found.inputs(), found.hash(), [])
        self._runs = [found.masked(document) for document in range(len(found))]
        self.left_out = found.left_out

    def masked(self, document: int) -> Ints:
        return self._runs[document]


class SentBlocks:
    """Blocks of which the process has lengths that were sent, and no tokens."""

    def __init__(self, texts: Mapping[str, Texts]) -> None:
        self._blocks = LocalBlocks(texts)
        self.asked, self.kept, self.closed = list[BlockId](), list[BlockId](), False

    def ask(self, wanted: Iterable[BlockId]) -> None:
        self.asked = list(wanted)

    def lengths(self, block: BlockId) -> Sent:
        sent: Sent = pickle.loads(pickle.dumps(Sent(self._blocks, block)))
        return sent

    def slices(self, wanted: Sequence[Range]) -> list[Slice]:
        pytest.fail("planning reads no tokens")

    def keep(self, wanted: Iterable[BlockId]) -> None:
        self.kept = list(wanted)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Texts of which some cannot be used, rows with masks, and a token file."""
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 500)
    texts = ["{" if number % 9 == 0 else json.dumps({"text": "x" * (number % 40)}) for number in range(150)]
    rows = list[dict[str, list[int]]]()
    for length in range(3, 33):
        rows.append({"ids": [*range(length)], "loss_mask": [0, *(int(at % 5 < 2) for at in range(1, length))]})
    (tmp_path / "texts.jsonl").write_text("\n".join(texts))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "packed.jsonl").write_text("\n".join(json.dumps({"text": "y" * number}) for number in range(1, 50)))
    pack(load(["data=jsonl", f"data.path={tmp_path / 'packed.jsonl'}"]).data, tmp_path / "packed", workers=1)
    sources = [
        f"data.sources.texts.path={tmp_path / 'texts.jsonl'}",
        *(f"data.sources.rows.path={tmp_path / 'rows.jsonl'}", "data.sources.rows.field=ids"),
        *(f"data.sources.packed.path={tmp_path / 'packed'}", "data.sources.packed.format=tokens"),
        *("data.mix={texts: 2, rows: 1, packed: 1}", "data.quarantine_after=2", "data.validation_share=0.2"),
    ]
    sizes = ["context=16", "capacity=16", "batch_tokens=200", "data.validation_tokens=120"]
    return load(["recipe=quickstart", "data=jsonl", f"data.cache={tmp_path / 'cache'}", *sources, *sizes])


def planner_of(config: Config, make_blocks: MakeBlocks) -> StepPlanner:
    sources = open_sources(config.data, list_blocks(config.data), make_blocks=make_blocks)
    return StepPlanner(sources, Job(config))


def test_steps_that_are_planned_from_sent_lengths_are_those_of_local_blocks(config: Config) -> None:
    """Tables with loss tokens, plans, cursors and the documents that were left out; also validation sets."""
    local, sent = planner_of(config, LocalBlocks), planner_of(config, SentBlocks)
    sets, other_sets = (received_sets(planner.validation()) for planner in (local, sent))
    assert sets.keys() == other_sets.keys() == {"texts", "rows", "packed"}
    for name, one in sets.items():
        assert same(one.table, other_sets[name].table) and one.plan.digest == other_sets[name].plan.digest
    cursor, unusable, masked = Cursor(), 0, 0
    for _ in range(STEPS):
        one, other = (received_step(planner.step(cursor)) for planner in (local, sent))
        assert same(one.table, other.table) and one.plan.digest == other.plan.digest
        assert (one.after, one.unusable, one.ended) == (other.after, other.unusable, other.ended)
        assert (one.balance, one.step_s, one.flops) == (other.balance, other.step_s, other.flops)
        cursor, unusable = one.after, unusable + len(one.unusable)
        masked += int(np.count_nonzero(one.table.loss_tokens < one.table.length))
    assert unusable >= 16 and masked > STEPS


def test_a_planner_asks_for_blocks_of_texts_alone(config: Config) -> None:
    planner = planner_of(config, SentBlocks)
    blocks = planner.blocks
    assert isinstance(blocks, SentBlocks)
    planner.validation()
    assert {block.source for block in blocks.kept} == {"texts", "rows"} and blocks.asked == blocks.kept
    planner.step(Cursor())
    assert {block.source for block in blocks.asked} == {"texts", "rows"}
    planner.close()
    assert blocks.closed
