"""Micro-batches of real plans: steps of lengths like the paper's GitHub data, planned as in training.

Fixed lengths repeat the same shapes. Real plans have new ones in every step, and kernels that prepare something for
each new shape, as cuDNN does, stall there.
"""

from __future__ import annotations

from benchmarks.gpu.prepared import prepared
from engine.config.load import load
from engine.config.schema import Config
from engine.data.lengths import step_lengths
from engine.job import Job
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import MicroBatch


def config_of(ranks: int, capacity: int, context: int, step_tokens: int, *more: str) -> Config:
    """Load the config of the 1B recipe with GitHub's lengths, on one node of `ranks` H200s."""
    # Documents longer than the context are split. `lengths.max` would make all of them shorter instead.
    lengths = [f"capacity={capacity}", f"context={context}", f"batch_tokens={step_tokens}"]
    return load(["recipe=h200-1b-8k", "lengths=github", f"cluster.ranks_per_node={ranks}", *lengths, *more])


def planned(config: Config, steps: int, rank: int = 0, write: bool = False) -> list[list[MicroBatch]]:
    """Plan the first steps of a config; return the micro-batches of a rank in each step, without idle ones.

    They are read if they were prepared; `write` prepares them.
    """

    def plan() -> list[list[MicroBatch]]:
        settings = Job(config).settings
        plans = (plan_step(lengths, settings) for lengths in step_lengths(config, steps))
        return [[micro for micro in plan.of_rank(rank) if micro.shards] for plan in plans]

    return prepared(config, f"{steps} steps of rank {rank}", plan, write)


def tokens_of(micro: MicroBatch) -> int:
    """Return the tokens of a micro-batch on its rank, to within one per shard of a ring."""
    return sum(shard.length // shard.degree for shard in micro.shards)


def pairs_of(micro: MicroBatch) -> float:
    """Return the (query, key) pairs that a rank computes in a micro-batch."""
    return sum(shard.length * (shard.length + 1) / 2 / shard.degree for shard in micro.shards)
