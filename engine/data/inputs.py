"""The input of the model on one rank in one micro-batch: tokens, labels and positions of its shards.

Letters: T tokens of a micro-batch on one rank. Example: the positions of two shards, part 0 of a sequence of 12 tokens
on a ring of 2, and an unsplit sequence of 4 tokens:

```
 0 1 2    9 10 11    0 1    2 3
 low      high       low    high    chunk
 --- shard 0 ----    - shard 1 -
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.data.blocks.blocks import Range, Slice
from engine.data.sequences import SequenceTable
from engine.planner.plan.schedule import shard_spans
from engine.planner.plan.step_plan import MicroBatch
from engine.units import Ints

IGNORE = -100  # the label of tokens that do not count in the loss


class Reads(Protocol):
    """Reads the tokens of ranges: from blocks (`Reader`), or from the file of a rank (`RankFile`)."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the sources."""
        ...

    def read(self, wanted: Sequence[Range]) -> Sequence[Slice]:
        """Return the tokens of ranges, in their order. Raises DataError and StorageError."""
        ...


@dataclass(frozen=True, eq=False)
class RankInputs:
    """The input of one rank for a micro-batch. T is 0 if all its shards are empty."""

    tokens: Ints  # [T]
    labels: Ints  # [T] the next token of each token
    positions: Ints  # [T] positions in the sequence, from 0


def rank_inputs(reader: Reads, table: SequenceTable, micro: MicroBatch) -> RankInputs:
    """Read the shards of a micro-batch from its documents, each as its low chunk followed by its high chunk.

    `table` contains the sequences that the shards refer to. An idle micro-batch gets `idle_inputs()`. Raises DataError
    and StorageError as `Reads.read` does.
    """
    if not micro.shards:
        return idle_inputs()
    none = np.empty(0, dtype=np.int64)
    tokens, labels, positions = [none], [none], [none]
    read = reader.read(wanted(reader.names, table, micro))
    for (_, start, stop), (ids, counted) in zip(_chunks(micro), read, strict=True):
        tokens.append(ids[:-1])
        labels.append(ids[1:] if counted is None else np.where(counted[1:], ids[1:], IGNORE))
        positions.append(np.arange(start, stop, dtype=np.int64))
    return RankInputs(np.concatenate(tokens), np.concatenate(labels), np.concatenate(positions))


def wanted(names: Sequence[str], table: SequenceTable, micro: MicroBatch) -> list[Range]:
    """Return the ranges that `rank_inputs` reads for a micro-batch, in its order. `names` are those of the sources.

    Each range has one more token than inputs: the label of the last one. Nothing is read, so that another process can
    fetch the ranges before.
    """
    found = list[Range]()
    for sequence, start, stop in _chunks(micro):
        source, block, document, begin, content = (
            column[sequence].item() for column in (table.source, table.block, table.document, table.start, table.hash)
        )
        found.append(Range(names[source], block, document, begin + start, begin + stop + 1, content))
    return found


def _chunks(micro: MicroBatch) -> Iterator[tuple[int, int, int]]:
    """Yield the number of the sequence and the positions start .. stop - 1 of each chunk that has tokens."""
    for shard in micro.shards:
        before = sum(shard.earlier)
        for span in shard_spans(shard.length, shard.degree, shard.part):
            if span.tokens:
                yield shard.sequence, before + span.start, before + span.stop


def idle_inputs() -> RankInputs:
    """Return the input of an idle micro-batch: one token whose label is ignored, so that its loss is 0."""
    tokens, labels, positions = (np.array([value], dtype=np.int64) for value in (0, IGNORE, 0))
    return RankInputs(tokens, labels, positions)
