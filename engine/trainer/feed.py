"""The data of a run: the documents of each step, and the tokens that a rank passes to its model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from engine.config.schema import Config
from engine.data.index import Index
from engine.data.reader import Reader
from engine.data.slices import Slices, micro_batch_slices
from engine.data.steps import Cursor, SequenceTable, next_step, validation_table


class Feed:
    """Provides the sequences of each step and of the validation set, and reads their tokens.

    The sequences of a step are a pure function of the index, the seed and the cursor, so all ranks get the same ones
    without communication.
    """

    def __init__(self, config: Config, index_path: Path) -> None:
        self.index = Index.load(index_path)
        self._config = config
        self._reader = Reader(config.data, self.index)

    def step(self, cursor: Cursor) -> tuple[SequenceTable, Cursor]:
        """Return the sequences of the step at `cursor`, and the cursor of the next step."""
        config = self._config
        return next_step(self.index, cursor, config.run.seed, config.batch_tokens, config.context)

    def validation(self) -> SequenceTable:
        """Return the sequences of the validation set; empty if validation is off."""
        return validation_table(self.index, self._config.context, self._config.data.validation_tokens)

    def slicer(self, table: SequenceTable) -> partial[Slices]:
        """Return a function that reads the slices of a micro-batch, whose shards refer to the sequences of `table`."""
        return partial(micro_batch_slices, self._reader, table)
