"""Which documents were in a step of a run, where they ran, and in which steps a document was: answers of the ledger."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.config.load import read_resolved
from engine.config.schema import Config
from engine.data.corpus import Corpus
from engine.data.ledger import Ledger, Rows
from engine.data.opening import open_run
from engine.data.places import Known, Match, Place, at_place, places_of
from engine.errors import ConfigError, DataError
from engine.run import metrics
from engine.run.folder import RunFolder
from engine.units import Ints

_ID = re.compile(r"([^:/]+):(\d+):(\d+)")


class Traced(NamedTuple):
    """A sequence of a finished step."""

    step: int
    document: Known
    place: Place
    start: int  # first input in the document
    length: int  # inputs
    loss_tokens: int
    ranks: list[int]  # HDP ranks, in the order of their ring

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "step": self.step,
            **self.document.to_json(),
            **self.place._asdict(),
            "start": self.start,
            "length": self.length,
            "loss_tokens": self.loss_tokens,
            "ranks": self.ranks,
        }


@dataclass(frozen=True)
class History:
    """The steps of the run in a folder."""

    folder: RunFolder
    config: Config
    ledger: Ledger
    finished: int  # the last finished step

    @classmethod
    def of(cls, root: Path) -> History:
        """Open a run, which may be running. Raises ConfigError if there is none."""
        folder = RunFolder(root)
        for path in (folder.resolved, folder.blocks):
            if not path.exists():
                hint = "choose a folder that run.out named"
                raise ConfigError(f"is not the folder of a run: it has no {path.name}", key=str(root), hint=hint)
        steps = [line["step"] for line in metrics.read_metrics(folder.metrics)]
        return cls(folder, read_resolved(folder.resolved), Ledger(folder.ledger), max(steps, default=0))

    @cached_property
    def corpora(self) -> list[Corpus]:
        """The sources of the run. Raises DataError if one cannot be opened."""
        return open_run(self.folder, self.config).corpora

    def rows(self, step: int) -> Rows:
        """Return the sequences of a step: ROW [S].

        The step after the last finished one may be among them: it was run, but failed, for example because its loss was
        not finite. Raises ConfigError for any other that has not been finished, DataError if it is no longer in the
        ledger.
        """
        failed = step == self.finished + 1 and self._was_run(step)
        if not 1 <= step <= self.finished and not failed:
            message = f"step {step} has not been finished; the last finished step is {self.finished}"
            if not self.finished:
                message = f"step {step} has not been finished; the run has no finished step"
            raise ConfigError(message, key="--step", hint="choose a finished step, or `bytescale data head --run RUN`")
        rows = self.ledger.documents(step)
        if not len(rows):
            first = self.ledger.first
            known = "which is empty" if first is None else f"which begins with step {first}"
            newest = f"the ledger keeps the newest steps; choose {first} or a later one"
            hint = newest if first else "restore the folder from a copy of the run"
            raise DataError(f"step {step} is not in the ledger, {known}", key=str(self.ledger.folder), hint=hint)
        return rows

    def _was_run(self, step: int) -> bool:
        """Return whether the ledger has every sequence of a step; a crash may have left a part of them."""
        sequences = np.unique(self.ledger.shards(step)["sequence"])
        return 0 < len(sequences) == len(self.ledger.documents(step))

    def trace_step(self, step: int) -> list[Traced]:
        """Return the sequences of a step. Raises the errors of `rows`, and StorageError as `places_of` does."""
        rows = self.rows(step)
        return self._traced([(rows, self.ledger.shards(step), np.arange(len(rows)))])

    def trace_document(self, document: str) -> tuple[list[Traced], str | None]:
        """Return the sequences of a document in all finished steps of the ledger; without any, also the reason.

        `document` is SOURCE:BLOCK:NUMBER, or a place; that of a file with several documents stands for all of them.
        Raises ConfigError if there is no such document, DataError if a file cannot be read, StorageError as `at_place`.
        """
        number = _ID.fullmatch(document)
        if number and number[1] in self.ledger.sources:
            matches, reason = [Match(number[1], int(number[2]), int(number[3]))], None
        else:
            matches, reason = at_place(self.corpora, document)
            if not matches and reason is None:
                hint = "give SOURCE:BLOCK:NUMBER or a place, as `bytescale data trace RUN --step N` shows them"
                raise ConfigError(f"no document of the run is at {document}", key="--document", hint=hint)
        parts = (
            (rows, shards, np.flatnonzero(self._are(rows, matches) & (rows["step"] <= self.finished)))
            for rows, shards in self.ledger.parts()
        )
        return self._traced(parts), reason

    def _are(self, rows: Rows, matches: list[Match]) -> NDArray[np.bool_]:
        """Return which rows [S] are of one of the documents."""
        sources, whole = self.ledger.sources, list[int]()
        blocks = rows["source"].astype(np.int64) << 32 | rows["block"]
        found = np.zeros(len(rows), dtype=np.bool_)
        for match in matches:
            if match.source not in sources:  # it was added when the run was resumed, and no step is finished since
                continue
            block = sources.index(match.source) << 32 | match.block
            if match.document is None:
                whole.append(block)
            else:
                found |= (blocks == block) & (rows["document"] == match.document)
        return found | np.isin(blocks, whole)

    def _traced(self, parts: Iterator[tuple[Rows, Rows, Ints]] | list[tuple[Rows, Rows, Ints]]) -> list[Traced]:
        """Describe rows: `parts` are rows and shards of whole steps, and which of the rows [n]."""
        sources, found = self.ledger.sources, list[tuple[Any, list[int]]]()
        for rows, shards, chosen in parts:
            found += zip(rows[chosen], _ranks(rows, shards, chosen), strict=True)
        documents = [
            Known(sources[row["source"]], int(row["block"]), int(row["document"]), int(row["hash"])) for row, _ in found
        ]
        try:
            places = places_of(self.corpora, documents)
        except DataError as error:  # of a source that cannot be opened
            (problem,) = error.problems
            places = dict.fromkeys(documents, Place(None, f"{problem.key}: {problem.message}"))
        return [
            Traced(
                int(row["step"]),
                one,
                places[one],
                int(row["start"]),
                int(row["length"]),
                int(row["loss_tokens"]),
                ranks,
            )
            for one, (row, ranks) in zip(documents, found, strict=True)
        ]


def _ranks(rows: Rows, shards: Rows, chosen: Ints) -> Iterator[list[int]]:
    """Yield the ranks of each chosen row. Shards are sorted by step and sequence."""
    steps = rows["step"].astype(np.int64)
    sequence = chosen - np.searchsorted(steps, steps[chosen])
    keys = shards["step"].astype(np.int64) << 32 | shards["sequence"]
    wanted = steps[chosen] << 32 | sequence
    bounds = (np.searchsorted(keys, wanted, side=side).tolist() for side in ("left", "right"))
    for first, last in zip(*bounds, strict=True):
        yield shards["rank"][first:last].tolist()
