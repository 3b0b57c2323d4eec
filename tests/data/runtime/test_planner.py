"""Planning needs lengths alone, whichever process has packed the blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.config.schema import Config
from engine.data.blocks.blocks import BlockId, Range, Slice
from engine.data.blocks.known import KnownLengths
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.served import Served, received_lengths
from engine.data.blocks.texts import Texts
from engine.data.ledger import Ledger
from engine.data.opening import MakeBlocks, list_blocks, open_sources
from engine.data.order import ORDER
from engine.data.rank_file import ranges_of
from engine.data.runtime.planner import StepPlanner, received_sets, received_step
from engine.data.steps import Cursor
from engine.job import Job
from engine.planner.plan.step_plan import StepPlan
from tests.data.memory import same
from tests.data.runtime.mixed import mixed_config

STEPS = 12


class SentBlocks:
    """Blocks of which the process has lengths that were sent, and no tokens."""

    def __init__(self, texts: Mapping[str, Texts]) -> None:
        self._blocks = LocalBlocks(texts)
        self.asked, self.kept, self.closed = list[BlockId](), list[BlockId](), False

    def ask(self, wanted: Iterable[BlockId]) -> None:
        self.asked = list(wanted)

    def lengths(self, block: BlockId) -> KnownLengths:
        self._blocks.lengths(block)
        return received_lengths(Served(self._blocks).lengths([block]))[block]

    def slices(self, wanted: Sequence[Range]) -> list[Slice]:
        pytest.fail("planning reads no tokens")

    def keep(self, wanted: Iterable[BlockId]) -> None:
        self.kept = list(wanted)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    return mixed_config(tmp_path, monkeypatch)


def planner_of(config: Config, make_blocks: MakeBlocks) -> StepPlanner:
    sources = open_sources(config.data, list_blocks(config.data), make_blocks=make_blocks)
    return StepPlanner(sources, Job(config))


def test_steps_that_are_planned_from_sent_lengths_are_those_of_local_blocks(config: Config) -> None:
    """Tables with loss tokens, plans, cursors and the documents that were left out; also validation sets."""
    local, sent = planner_of(config, LocalBlocks), planner_of(config, SentBlocks)
    sets, other_sets = (received_sets(planner.validation(ORDER)) for planner in (local, sent))
    assert sets.keys() == other_sets.keys() == {"texts", "rows", "packed"}
    for name, one in sets.items():
        assert same(one.table, other_sets[name].table) and one.plan.digest == other_sets[name].plan.digest
    cursor, unusable, masked = Cursor(), 0, 0
    for _ in range(STEPS):
        one, other = (received_step(planner.step(cursor)) for planner in (local, sent))
        assert same(one.table, other.table) and one.plan.digest == other.plan.digest
        assert (one.after, one.unusable, one.ended) == (other.after, other.unusable, other.ended)
        assert one.dropped == other.dropped
        assert (one.balance, one.step_s, one.flops) == (other.balance, other.step_s, other.flops)
        cursor, unusable = one.after, unusable + len(one.unusable)
        masked += int(np.count_nonzero(one.table.loss_tokens < one.table.length))
    assert unusable >= 16 and masked > STEPS


def test_hosts_get_the_documents_of_their_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all figures of the step. The first one has the whole plan, with the rows of the ledger."""
    config, names = mixed_config(tmp_path, monkeypatch, "cluster.ranks_per_node=6"), ["texts", "rows", "packed"]
    planner, hosts = planner_of(config, LocalBlocks), [[0, 1], [2, 3, 4], [5]]
    step = received_step(planner.step(Cursor()))
    sent = [received_step(one) for one in planner.step_of_hosts(Cursor(), hosts)]
    sets = received_sets(planner.validation(ORDER))
    sent_sets = [received_sets(one) for one in planner.validation_of_hosts(ORDER, hosts)]
    assert all(each.keys() == sets.keys() == {*names} for each in sent_sets)
    for whole, cuts in [(step, sent), *((one, [each[name] for each in sent_sets]) for name, one in sets.items())]:
        assert (whole.loss_tokens, whole.plan.tokens) == (whole.table.loss_tokens.sum(), whole.table.length.sum())
        assert [isinstance(one.plan, StepPlan) for one in cuts] == [True, False, False]
        for ranks, one in zip(hosts, cuts, strict=True):
            assert (one.plan.digest, one.loss_tokens) == (whole.plan.digest, whole.loss_tokens)
            for rank in ranks:
                assert ranges_of(names, one.table, one.plan, rank) == ranges_of(names, whole.table, whole.plan, rank)
                rows = [
                    (plan.table.length[shard.sequence], plan.table.loss_tokens[shard.sequence])
                    for plan in (one, whole)
                    for micro in plan.plan.of_rank(rank)
                    for shard in micro.shards
                ]
                assert rows[: len(rows) // 2] == rows[len(rows) // 2 :]
    assert step.loss_tokens < step.plan.tokens
    everything = [[*range(6)]]  # on one host
    assert [one.sequences for one in planner.step_of_hosts(Cursor(), everything)] == [planner.step(Cursor()).sequences]
    assert planner.validation_of_hosts(ORDER, everything) == [planner.validation(ORDER)]
    for one in sent:
        assert (one.after, one.balance, one.step_s, one.flops) == (step.after, step.balance, step.step_s, step.flops)
    for name, planned in {"all": step, "first": sent[0]}.items():
        Ledger(tmp_path / name, names).record(1, planned.table, planned.whole)
    for file in (tmp_path / "all").iterdir():
        assert file.read_bytes() == (tmp_path / "first" / file.name).read_bytes()


def test_a_planner_asks_for_blocks_of_texts_alone(config: Config) -> None:
    planner = planner_of(config, SentBlocks)
    blocks = planner.blocks
    assert isinstance(blocks, SentBlocks)
    planner.validation(ORDER)
    assert {block.source for block in blocks.kept} == {"texts", "rows"} and blocks.asked == blocks.kept
    planner.step(Cursor())
    assert {block.source for block in blocks.asked} == {"texts", "rows"}
    planner.close()
    assert blocks.closed
