"""What a rank feeds the model in a micro-batch: the inputs, labels and positions of its shards, and nothing else.

Letters: T tokens of a micro-batch on one rank. Two shards: part 0 of a sequence of 12 on a
ring of 2, and a sequence of 4 without a ring. Their positions:

```
 0 1 2    9 10 11    0 1    2 3
 low      high       low    high    chunk
 --- shard 0 ----    - shard 1 -
```
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.data.reader import Reader
from engine.data.steps import SequenceTable
from engine.data.tokenizer import BOS
from engine.planner.plan import Ints, MicroBatch
from engine.planner.schedule import Span, shard_spans

IGNORE = -100  # a label that is no loss token


@dataclass(frozen=True, eq=False)
class Slices:
    """A rank's part of a micro-batch. T is 0 when all its shards are empty."""

    tokens: Ints  # [T]
    labels: Ints  # [T] the token after each
    positions: Ints  # [T] in the sequence, from 0


def micro_batch_slices(reader: Reader, table: SequenceTable, micro: MicroBatch) -> Slices:
    """Return the shards of a micro-batch one after the other, each its low chunk and then its high chunk.

    Reads only those spans. An idle micro-batch gets `idle_slices()`. Raises DataError as `Reader.tokens` does.
    """
    if not micro.shards:
        return idle_slices()
    parts = [
        _span_slices(reader, table, shard.sequence, span)
        for shard in micro.shards
        for span in shard_spans(shard.length, shard.degree, shard.part)
    ]
    return Slices(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.positions for part in parts]),
    )


def idle_slices() -> Slices:
    """Return one input without a loss token, so that a rank without work runs the same model with weight 0."""
    return Slices(_ints(BOS), _ints(IGNORE), _ints(0))


def _span_slices(reader: Reader, table: SequenceTable, sequence: int, span: Span) -> Slices:
    positions = np.arange(span.start, span.stop, dtype=np.int64)
    if not span.tokens:
        return Slices(positions, positions, positions)
    start = int(table.start[sequence]) + span.start
    tokens = reader.tokens(int(table.document[sequence]), start, start + span.tokens + 1)  # one more: the last label
    return Slices(tokens[:-1], tokens[1:], positions)


def _ints(value: int) -> Ints:
    return np.array([value], dtype=np.int64)
