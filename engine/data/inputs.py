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

from dataclasses import dataclass

import numpy as np

from engine.data.corpus import Reader
from engine.data.steps import SequenceTable
from engine.planner.plan.schedule import shard_spans
from engine.planner.plan.step_plan import MicroBatch
from engine.units import Ints

IGNORE = -100  # the label of tokens that do not count in the loss


@dataclass(frozen=True, eq=False)
class RankInputs:
    """The input of one rank for a micro-batch. T is 0 if all its shards are empty."""

    tokens: Ints  # [T]
    labels: Ints  # [T] the next token of each token
    positions: Ints  # [T] positions in the sequence, from 0


def rank_inputs(reader: Reader, table: SequenceTable, micro: MicroBatch) -> RankInputs:
    """Read the shards of a micro-batch from its documents, each as its low chunk followed by its high chunk.

    `table` contains the sequences that the shards refer to. An idle micro-batch gets `idle_inputs()`. Raises DataError
    as `Reader.tokens` does.
    """
    if not micro.shards:
        return idle_inputs()
    none = np.empty(0, dtype=np.int64)
    tokens, labels, positions = [none], [none], [none]
    for shard in micro.shards:
        sequence = shard.sequence
        place = int(table.source[sequence]), int(table.block[sequence]), int(table.document[sequence])
        before, content = sum(shard.earlier), int(table.hash[sequence])
        begin = int(table.start[sequence]) + before
        for span in shard_spans(shard.length, shard.degree, shard.part):
            if not span.tokens:
                continue
            # Read one more token, the label of the last input.
            read = reader.tokens(*place, begin + span.start, begin + span.stop + 1, content)
            counted = reader.counted(*place, begin + span.start + 1, begin + span.stop + 1)
            tokens.append(read[:-1])
            labels.append(read[1:] if counted is None else np.where(counted, read[1:], IGNORE))
            positions.append(np.arange(before + span.start, before + span.stop, dtype=np.int64))
    return RankInputs(np.concatenate(tokens), np.concatenate(labels), np.concatenate(positions))


def idle_inputs() -> RankInputs:
    """Return the input of an idle micro-batch: one token whose label is ignored, so that its loss is 0."""
    tokens, labels, positions = (np.array([value], dtype=np.int64) for value in (0, IGNORE, 0))
    return RankInputs(tokens, labels, positions)
