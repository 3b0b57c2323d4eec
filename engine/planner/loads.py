"""What each shard and each micro-batch of a plan holds and costs, and who sends to whom.

Letters: S sequences, P ranks, K shards, M micro-batches (plan.py).
"""

from __future__ import annotations

import numpy as np

from engine.cost.model import Costs
from engine.planner.plan import Ints, StepPlan


def shard_tokens(plan: StepPlan) -> Ints:
    """Return the tokens of each shard, [K]."""
    spans = _spans(plan)
    return sum((stop - start for start, stop in spans), start=np.zeros_like(plan.ring_ranks))


def shard_pairs(plan: StepPlan) -> Ints:
    """Return the (query, key) pairs of each shard, [K]: the query at position p meets p + 1 keys."""
    pairs = ((stop * (stop + 1) - start * (start + 1)) // 2 for start, stop in _spans(plan))
    return sum(pairs, start=np.zeros_like(plan.ring_ranks))


def micro_tokens(plan: StepPlan) -> Ints:
    """Return the tokens of each micro-batch, [M]."""
    return per_micro(plan, shard_tokens(plan))


def micro_costs(plan: StepPlan, costs: Costs) -> Ints:
    """Return the cost of each micro-batch in cost units, [M], the fixed cost included."""
    return per_micro(plan, costs.work(shard_tokens(plan), shard_pairs(plan))) + costs.fixed


def peak_bytes(plan: StepPlan, costs: Costs) -> Ints:
    """Return the peak memory of each micro-batch's rank, [M]."""
    largest = -(-plan.lengths // plan.degrees) * (plan.degrees > 1)  # [S] a ring's buffers hold any member's shard
    return costs.peak_bytes(micro_tokens(plan), per_micro(plan, largest[plan.shard_sequence]))


def links(plan: StepPlan) -> tuple[Ints, Ints]:
    """Return the shards that send and those that receive: each part of a ring of two or more, and the next part."""
    following = np.arange(1, len(plan.ring_ranks) + 1)
    following[plan.ring_start[1:] - 1] = plan.ring_start[:-1]
    sender = np.flatnonzero(plan.degrees[plan.shard_sequence] > 1)
    return sender, following[sender]


def peers(plan: StepPlan) -> Ints:
    """Return the number of distinct ranks that each rank sends to or receives from, [P]."""
    source, target = (plan.ring_ranks[shards] for shards in links(plan))
    pairs = np.unique(np.concatenate([source * plan.ranks + target, target * plan.ranks + source]))
    return np.bincount(pairs // plan.ranks, minlength=plan.ranks)


def per_micro(plan: StepPlan, values: Ints) -> Ints:
    """Return the sum over each micro-batch's shards, [M], of `values` [K]."""
    sums = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values[plan.shard_order])])
    return np.diff(sums[plan.shard_start])


def _spans(plan: StepPlan) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
    """Return the bounds of each shard's two chunks; `schedule.shard_spans` over arrays."""
    degree = plan.degrees[plan.shard_sequence]
    part = np.arange(len(plan.ring_ranks)) - plan.ring_start[:-1][plan.shard_sequence]
    size, longer = np.divmod(plan.lengths[plan.shard_sequence], 2 * degree)

    def chunk(number: Ints) -> tuple[Ints, Ints]:
        start = number * size + np.minimum(number, longer)
        return start, start + size + (number < longer)

    return chunk(part), chunk(2 * degree - 1 - part)
