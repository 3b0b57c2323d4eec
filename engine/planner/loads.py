"""What each shard and each micro-batch of a plan holds, and who sends to whom. For plans whose arrays are well-formed.

Letters: S sequences, P ranks, K shards, M micro-batches (plan.py).
"""

from __future__ import annotations

import numpy as np

from engine.compiled import kernel
from engine.planner.plan import Ints, StepPlan
from engine.planner.rows import following
from engine.planner.schedule import chunk_start, part_tokens


def shard_loads(plan: StepPlan) -> tuple[Ints, Ints]:
    """Return each shard's tokens, [K], and its (query, key) pairs, [K]: the query at position p meets p + 1 keys."""
    return _shard_loads(plan.lengths, plan.ring_start)


def micro_tokens(plan: StepPlan) -> Ints:
    """Return the tokens of each micro-batch, [M]."""
    return micro_loads(plan)[0]


def micro_loads(plan: StepPlan) -> tuple[Ints, Ints]:
    """Return the tokens of each micro-batch, [M], and those of the largest shard of each of its rings, summed, [M].

    A ring's buffers hold any member's shard, so the latter are their size.
    """
    return _micro_loads(plan.lengths, plan.ring_start, plan.shard_micro, plan.micro_batches)


def next_shards(plan: StepPlan) -> Ints:
    """Return for each shard the one that its ring's next member holds, [K]; itself without a ring."""
    return following(plan.ring_start)


def neighbours(plan: StepPlan) -> tuple[Ints, Ints]:
    """Return the rank that each shard is sent to, and the one that its rank receives from, [K]; -1 without a ring."""
    return _neighbours(plan.ring_start, plan.ring_ranks)


def peers(plan: StepPlan) -> Ints:
    """Return the number of distinct ranks that each rank sends to or receives from, [P]."""
    return _peers(plan.micro_start, plan.shard_start, plan.shard_order, *neighbours(plan))


@kernel
def _shard_loads(lengths: Ints, ring_start: Ints) -> tuple[Ints, Ints]:
    tokens, pairs = np.zeros(ring_start[-1], np.int64), np.zeros(ring_start[-1], np.int64)
    for sequence in range(len(lengths)):
        first, degree = ring_start[sequence], ring_start[sequence + 1] - ring_start[sequence]
        size, longer = divmod(lengths[sequence], 2 * degree)
        for part in range(degree):
            for chunk in (part, 2 * degree - 1 - part):
                start, stop = chunk_start(size, longer, chunk), chunk_start(size, longer, chunk + 1)
                tokens[first + part] += stop - start
                pairs[first + part] += (stop * (stop + 1) - start * (start + 1)) // 2
    return tokens, pairs


@kernel
def _micro_loads(lengths: Ints, ring_start: Ints, shard_micro: Ints, micro_batches: int) -> tuple[Ints, Ints]:
    tokens, buffers = np.zeros(micro_batches, np.int64), np.zeros(micro_batches, np.int64)
    for sequence in range(len(lengths)):
        first, degree = ring_start[sequence], ring_start[sequence + 1] - ring_start[sequence]
        if degree == 1:  # most are, and a division takes long
            tokens[shard_micro[first]] += lengths[sequence]
            continue
        size, longer = divmod(lengths[sequence], 2 * degree)
        for part in range(degree):
            micro = shard_micro[first + part]
            tokens[micro] += part_tokens(size, longer, degree, part)
            buffers[micro] += -(-lengths[sequence] // degree)
    return tokens, buffers


@kernel
def _neighbours(ring_start: Ints, ring_ranks: Ints) -> tuple[Ints, Ints]:
    target, source = np.full(len(ring_ranks), -1), np.full(len(ring_ranks), -1)
    after = following(ring_start)
    for shard in range(len(ring_ranks)):
        if after[shard] != shard:
            target[shard] = ring_ranks[after[shard]]
            source[after[shard]] = ring_ranks[shard]
    return target, source


@kernel
def _peers(micro_start: Ints, shard_start: Ints, shard_order: Ints, target: Ints, source: Ints) -> Ints:
    ranks = len(micro_start) - 1
    seen = np.full(ranks, -1)  # by peer: the last rank that counted it
    count = np.zeros(ranks, np.int64)
    for rank in range(ranks):
        for place in range(shard_start[micro_start[rank]], shard_start[micro_start[rank + 1]]):
            for peer in (target[shard_order[place]], source[shard_order[place]]):
                if peer >= 0 and seen[peer] != rank:
                    seen[peer] = rank
                    count[rank] += 1
    return count
