"""The local runtime: each node plans for itself in one process, and each rank reads its documents from `data.cache`.

The planning process has loaders, which pack documents ahead. It plans a step while the ranks run the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from engine.config.schema import Config
from engine.data.corpus import Reader, corpora_of
from engine.data.inputs import RankInputs, rank_inputs
from engine.data.runtime.node import NodeAnswers
from engine.data.runtime.planner import StepPlanner, received_sets, received_step
from engine.data.runtime.runtime import Planned, PlannedSequences
from engine.data.steps import Cursor
from engine.planner.settings import PlanSettings
from engine.run.folder import RunFolder


class LocalRuntime:
    """The DataRuntime of a rank."""

    def __init__(
        self, folder: RunFolder, config: Config, settings: PlanSettings, sockets: Sequence[int] = (), first: bool = True
    ) -> None:
        """Open the documents of a run. Sockets and `first` are those of OpenRuntime."""
        self._reader = Reader(corpora_of(folder, config), config.model.vocab)
        self._answers = NodeAnswers(partial(StepPlanner, folder, config, settings), sockets, first)

    def request(self, cursor: Cursor) -> None:
        self._answers.ask(StepPlanner.step, cursor)

    def take(self) -> Planned:
        return received_step(self._answers.answer())

    def validation(self) -> dict[str, PlannedSequences]:
        self._answers.ask(StepPlanner.validation)
        return received_sets(self._answers.answer())

    def input_reader(self, planned: PlannedSequences) -> partial[RankInputs]:
        return partial(rank_inputs, self._reader, planned.table)

    def close(self) -> None:
        self._answers.close()
