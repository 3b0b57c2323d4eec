"""The data of a run: the sequences of each step, and the tokens that a rank passes to its model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from engine.config.schema import Config
from engine.data.corpus import Reader, corpora_of
from engine.data.inputs import RankInputs, rank_inputs
from engine.data.steps import SequenceTable
from engine.errors import DataError
from engine.readers import read_object
from engine.run.folder import RunFolder


def fingerprints_of(folder: RunFolder) -> Mapping[str, Any]:
    """Return the fingerprint of each source of a run, by name, which the launcher has computed."""
    hint = "resume the run, which writes it again"
    found = read_object(folder.summary, hint=hint).get("fingerprints")
    if not isinstance(found, dict):
        raise DataError("has no fingerprints of documents", key=str(folder.summary), hint=hint)
    return found


class Feed:
    """Reads the tokens of sequences for the model of a rank."""

    def __init__(self, folder: RunFolder, config: Config) -> None:
        self._reader = Reader(corpora_of(folder, config), config.model.vocab)

    def input_reader(self, table: SequenceTable) -> partial[RankInputs]:
        """Return a function that reads the inputs of a micro-batch, whose shards refer to the sequences of `table`."""
        return partial(rank_inputs, self._reader, table)
