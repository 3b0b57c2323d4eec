"""The local runtime: each node plans for itself in one process, and each rank reads its documents from `data.cache`.

The planning process has loaders, which pack documents ahead. It plans a step while the ranks run the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from engine.config import schema
from engine.data.blocks.loaders import Loaders
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.texts import Texts
from engine.data.corpus import Reader
from engine.data.inputs import RankInputs, rank_inputs
from engine.data.opening import open_run
from engine.data.runtime.node import NodeAnswers
from engine.data.runtime.planner import StepPlanner, received_sets, received_step
from engine.data.runtime.runtime import Planned, PlannedSequences
from engine.data.steps import Cursor
from engine.data.workers import cores
from engine.job import Job
from engine.run.folder import RunFolder

_MOST_LOADERS = 8  # on each host, if data.loaders is not set


def loader_count(data: schema.Data) -> int:
    """Return how many loaders this host has."""
    return data.loaders or min(_MOST_LOADERS, max(1, cores() // 2))


def local_planner(folder: RunFolder, job: Job) -> StepPlanner:
    """Make the StepPlanner that runs in the planning process of a node, with loaders that pack its blocks."""
    data = job.config.data

    def make_blocks(texts: Mapping[str, Texts]) -> LocalBlocks:
        return LocalBlocks(texts, Loaders(loader_count(data), data.spool) if texts else None)

    return StepPlanner(open_run(folder, job.config, make_blocks), job)


class LocalRuntime:
    """The DataRuntime of a rank."""

    def __init__(self, folder: RunFolder, job: Job, sockets: Sequence[int] = (), first: bool = True) -> None:
        """Open the documents of a run.

        `sockets` lead to ranks of the same node. The `first` rank of a node starts its planning process.
        """
        self._reader = Reader(open_run(folder, job.config).corpora, job.config.model.vocab)
        self._answers = NodeAnswers(partial(local_planner, folder, job), sockets, first)

    def request(self, cursor: Cursor) -> None:
        self._answers.ask(StepPlanner.step, cursor)  # the planning process calls it on its StepPlanner

    def take(self) -> Planned:
        return received_step(self._answers.answer())

    def validation(self, order: int) -> dict[str, PlannedSequences]:
        self._answers.ask(StepPlanner.validation, order)
        return received_sets(self._answers.answer())

    def input_reader(self, planned: PlannedSequences) -> partial[RankInputs]:
        return partial(rank_inputs, self._reader, planned.table)

    def close(self) -> None:
        self._answers.close()
