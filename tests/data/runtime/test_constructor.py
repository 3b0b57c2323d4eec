"""What ranks read from rank files is what they read from `data.cache`, to the byte, for any plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from engine.config.schema import Config
from engine.data.blocks.blocks import Range, Slice
from engine.data.corpus import Reader
from engine.data.inputs import RankInputs, rank_inputs
from engine.data.opening import list_blocks, open_sources
from engine.data.order import ORDER
from engine.data.runtime.constructor import Constructor
from engine.data.runtime.planner import StepPlanner, received_sets, received_step
from engine.data.sequences import SequenceTable
from engine.data.steps import Cursor
from engine.errors import StorageError
from engine.job import Job
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from tests.data.runtime.mixed import mixed_config
from tests.planner.pipelines import sliced
from tests.refusals import refused

STEPS = 4


class Counting(Reader):
    """A reader that counts its calls and the tokens that it reads."""

    calls = tokens = 0

    def read(self, wanted: Sequence[Range]) -> list[Slice]:
        found = super().read(wanted)
        self.calls, self.tokens = self.calls + 1, self.tokens + sum(len(one.tokens) for one in found)
        return found


def config_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> Config:
    return mixed_config(tmp_path, monkeypatch, "context=32", "capacity=16", "data.validation_tokens=200", *more)


def check(
    made: Constructor, reader: Reader, name: str, table: SequenceTable, plan: StepPlan, names: Sequence[str]
) -> int:
    """Build files and compare what each HDP rank reads with what it reads from blocks; return the tokens."""
    files, tokens = made.build(name, table, plan), 0
    for rank in range(plan.ranks):
        file = files.open(names, table, plan, rank)
        for micro in plan.of_rank(rank):
            one, other = rank_inputs(reader, table, micro), rank_inputs(file, table, micro)
            assert plain(one) == plain(other)
            tokens += len(one.tokens) if micro.shards else 0
    assert tokens == int(table.length.sum())
    return tokens


def plain(found: RankInputs) -> list[tuple[str, bytes]]:
    return [(array.dtype.str, array.tobytes()) for array in (found.tokens, found.labels, found.positions)]


@pytest.mark.parametrize(
    "mesh",
    [
        ["planner=adaptive", "cluster.ranks_per_node=8"],
        ["planner=balanced", "cluster.ranks_per_node=4", "zero.stage=3"],
        ["planner=adaptive", "cluster.ranks_per_node=8", "parallel.tp=2", "parallel.pp=2", "model.layers=4"],
        ["planner=static", "cluster.ranks_per_node=4"],
    ],
)
def test_steps_and_validation_sets_of_all_kinds_of_sources(
    mesh: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks, documents that are split, rings, and ranks without work; one call reads all ranges of a host."""
    config = config_of(tmp_path, monkeypatch, *mesh)
    sources, job = open_sources(config.data, list_blocks(config.data)), Job(config)
    planner, reader = StepPlanner(sources, job), Reader(sources.corpora, config.model.vocab)
    ranks, counting = job.settings.ranks, Counting(sources.corpora, config.model.vocab)
    (tmp_path / "files").mkdir()
    made, names = Constructor(counting, tmp_path / "files", range(ranks)), reader.names
    used = 0
    for number, planned in enumerate(received_sets(planner.validation(ORDER)).values()):
        used += check(made, reader, f"validation-{number}", planned.table, planned.plan, names)
    cursor, masked, split = Cursor(), 0, 0
    for step in range(STEPS):
        planned = received_step(planner.step(cursor))
        used += check(made, reader, f"step-{step}", planned.table, planned.plan, names)
        masked += int(np.count_nonzero(planned.table.loss_tokens < planned.table.length))
        split += int(np.count_nonzero(planned.plan.degrees > 1))
        cursor = planned.after
    assert counting.calls == 3 + STEPS and masked > STEPS and split > 0
    assert len([*(tmp_path / "files").iterdir()]) == (3 + STEPS) * ranks


def test_random_steps_of_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences in slices, and ranks of which some have nothing to do."""
    config = config_of(tmp_path, monkeypatch, "cluster.ranks_per_node=8")
    sources, job, drawn = open_sources(config.data, list_blocks(config.data)), Job(config), random.Random(0)
    reader = Reader(sources.corpora, config.model.vocab)
    table = received_step(StepPlanner(sources, job).step(Cursor())).table
    made, idle = Constructor(reader, tmp_path, range(job.settings.ranks)), 0
    for number in range(20):
        chosen = np.array(drawn.sample(range(len(table)), drawn.randint(1, len(table))), dtype=np.int64)
        some = table.chosen(chosen)
        plan = sliced(plan_step(some.length, job.settings), drawn.randint(1, 4), 1, seed=number)
        check(made, reader, f"step-{number}", some, plan, reader.names)
        idle += sum(not any(micro.shards for micro in plan.of_rank(rank)) for rank in range(plan.ranks))
    assert idle > 0


def test_files_of_past_steps_and_of_killed_processes_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that another process has written, which this one replaces; a step may be built again."""
    config = config_of(tmp_path, monkeypatch, "cluster.ranks_per_node=4")
    sources, job = open_sources(config.data, list_blocks(config.data)), Job(config)
    planned = received_step(StepPlanner(sources, job).step(Cursor()))
    reader, folder = Reader(sources.corpora, config.model.vocab), tmp_path / "files"
    folder.mkdir()

    def files() -> list[str]:
        return sorted(path.name for path in folder.iterdir())

    made = Constructor(reader, folder, [1, 3])
    made.build("validation-0", planned.table, planned.plan)
    for step in (7, 8, 8, 9):
        made.build_step(step, planned.table, planned.plan)
    validation = ["validation-0.1", "validation-0.3"]
    assert files() == ["step-8.1", "step-8.3", "step-9.1", "step-9.3", *validation]
    (folder / ".step-10.1.abc").touch()
    other = Constructor(reader, folder, [1, 3], epoch=1)
    written = other.build_step(10, planned.table, planned.plan)
    assert files() == ["step-10.1", "step-10.3", "step-9.1", "step-9.3", *validation]
    written.open(reader.names, planned.table, planned.plan, 3)
    with refused(StorageError, folder / "step-9.3"):  # the process that was replaced wrote it
        written._replace(name="step-9").open(reader.names, planned.table, planned.plan, 3)
