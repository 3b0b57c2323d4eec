"""Runs micro-batches as training does, with random tokens."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.data.inputs import RankInputs
from engine.hardware.measured import Case
from engine.hardware.timing import Run, Stopwatch
from engine.planner.plan.schedule import shard_spans
from engine.planner.plan.step_plan import MicroBatch, Shard
from engine.trainer.step import RankContext, micro_batch_output, to_device
from engine.zero.engine import ZeroEngine


def runs(
    cases: list[Case], engines: Mapping[int, ZeroEngine], context: RankContext, ranks: int, vocab: int
) -> list[Run]:
    """Make a function for each case that runs it on this rank and returns its forward and backward seconds.

    `engines` maps numbers of layers to models; `ranks` is the number of HDP ranks.
    """

    def timed(engine: ZeroEngine, micro: MicroBatch) -> Run:
        inputs, watch = random_inputs(micro, vocab), Stopwatch(context.device)

        def run() -> tuple[float, float]:
            began = watch.now()
            loss = micro_batch_output(engine.forward, micro, to_device(inputs, context.device), context)
            middle = watch.now()
            engine.backward(loss, len(inputs.tokens))
            loss.item()
            return middle - began, watch.now() - middle

        return run

    return [timed(engines[case.layers], micro_batch(case, context.hdp_rank, ranks)) for case in cases]


def micro_batch(case: Case, rank: int, ranks: int) -> MicroBatch:
    """Build the micro-batch of `rank` for a case: its shards of sequences on rings, and all unsplit sequences."""
    ring = tuple(range(ranks))
    shards = [Shard(number, length, ring, rank) for number, length in enumerate(case.ring)]
    shards += [Shard(len(case.ring) + number, length, (rank,), 0) for number, length in enumerate(case.unsplit)]
    return MicroBatch(index=0, rank=rank, gang=0, slot=-1, shards=tuple(shards))


def random_inputs(micro: MicroBatch, vocab: int) -> RankInputs:
    """Make random tokens and labels at the positions of the micro-batch's shards."""
    positions = np.concatenate(
        [
            sum(shard.earlier) + np.arange(span.start, span.stop, dtype=np.int64)
            for shard in micro.shards
            for span in shard_spans(shard.length, shard.degree, shard.part)
        ]
    )
    tokens = np.random.default_rng(0).integers(0, vocab, len(positions) + 1)
    return RankInputs(tokens[:-1], tokens[1:], positions)
