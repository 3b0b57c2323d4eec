"""Times micro-batches as training runs them: the trainer's own forward and backward pass through ZeRO."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from engine.data.slices import Slices
from engine.hardware.measured import Case
from engine.hardware.timing import Run, Stopwatch
from engine.planner.plan import MicroBatch, Shard
from engine.planner.schedule import shard_spans
from engine.trainer.step import RankContext, micro_batch_loss
from engine.zero.engine import ZeroEngine


def runs(
    cases: list[Case], engines: Mapping[int, ZeroEngine], context: RankContext, ranks: int, vocab: int
) -> list[Run]:
    """Return what times each case on this rank; `engines` are the models by their number of layers."""
    return [_run(engines[case.layers], micro_batch(case, context.rank, ranks), context, vocab) for case in cases]


def micro_batch(case: Case, rank: int, ranks: int) -> MicroBatch:
    """Return this rank's part of a case."""
    ring = tuple(range(ranks))
    shards = [Shard(number, length, ring, rank) for number, length in enumerate(case.shared)]
    shards += [Shard(len(ring) + number, length, (rank,), 0) for number, length in enumerate(case.whole)]
    return MicroBatch(index=0, rank=rank, gang=0, slot=-1, shards=tuple(shards))


def _run(engine: ZeroEngine, micro: MicroBatch, context: RankContext, vocab: int) -> Run:
    slices, watch = random_slices(micro, vocab), Stopwatch(context.device)
    loss_tokens = len(slices.tokens)

    def run() -> tuple[float, float]:
        began = watch.now()
        loss = micro_batch_loss(engine.forward, micro, slices, context)
        middle = watch.now()
        engine.backward(loss, loss_tokens)
        loss.item()
        return middle - began, watch.now() - middle

    return run


def random_slices(micro: MicroBatch, vocab: int) -> Slices:
    """Return random tokens at the positions of the micro-batch's shards."""
    spans = [span for shard in micro.shards for span in shard_spans(shard.length, shard.degree, shard.part)]
    positions = np.concatenate([np.arange(span.start, span.stop, dtype=np.int64) for span in spans])
    tokens = np.random.default_rng(0).integers(0, vocab, len(positions) + 1)
    return Slices(tokens[:-1], tokens[1:], positions)
