"""The data of a run: the documents of each step, and the tokens that a rank passes to its model."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from engine.config.schema import Config
from engine.data.corpus import Reader, open_corpus
from engine.data.slices import Slices, micro_batch_slices
from engine.data.steps import Cursor, SequenceTable, next_step, validation_table
from engine.run.folder import RunFolder


def tokens_of(folder: RunFolder) -> Path:
    """Return the prefix of the run's token file, which the launcher wrote into its summary."""
    return Path(json.loads(folder.summary.read_text(encoding="utf-8"))["tokens"])


class Feed:
    """Provides the sequences of each step and of the validation set, and reads their tokens.

    The sequences of a step are a pure function of the corpus, the seed and the cursor, so all ranks get the same ones
    without communication.
    """

    def __init__(self, config: Config, tokens: Path) -> None:
        self.corpus = open_corpus(tokens, config.data.validation_share)
        self._config = config
        self._reader = Reader(self.corpus, config.model.vocab)

    def step(self, cursor: Cursor) -> tuple[SequenceTable, Cursor]:
        """Return the sequences of the step at `cursor`, and the cursor of the next step."""
        config = self._config
        return next_step(self.corpus, cursor, config.run.seed, config.batch_tokens, config.context)

    def validation(self) -> SequenceTable:
        """Return the sequences of the validation set; empty if validation is off."""
        return validation_table(self.corpus, self._config.context, self._config.data.validation_tokens)

    def slicer(self, table: SequenceTable) -> partial[Slices]:
        """Return a function that reads the slices of a micro-batch, whose shards refer to the sequences of `table`."""
        return partial(micro_batch_slices, self._reader, table)
