"""What each shard and each micro-batch of a plan holds, and who sends to whom. For plans whose arrays are well-formed.

Letters: S sequences, P ranks, K shards, M micro-batches (plan.py).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from engine.planner.plan import Ints, StepPlan


def shard_tokens(plan: StepPlan) -> Ints:
    """Return the tokens of each shard, [K]."""
    return _tokens(plan.lengths, plan.ring_start)


def shard_pairs(plan: StepPlan) -> Ints:
    """Return the (query, key) pairs of each shard, [K]: the query at position p meets p + 1 keys."""
    return _pairs(plan.lengths, plan.ring_start)


def micro_tokens(plan: StepPlan) -> Ints:
    """Return the tokens of each micro-batch, [M]."""
    return micro_loads(plan)[0]


def micro_loads(plan: StepPlan) -> tuple[Ints, Ints]:
    """Return the tokens of each micro-batch, [M], and those of the largest shard of each of its rings, summed, [M].

    A ring's buffers hold any member's shard, so the latter are their size.
    """
    return _micro_loads(plan.lengths, plan.ring_start, plan.shard_micro, plan.micro_batches)


def neighbours(plan: StepPlan) -> tuple[Ints, Ints]:
    """Return the rank that each shard is sent to, and the one that its rank receives from, [K]; -1 without a ring."""
    return _neighbours(plan.ring_start, plan.ring_ranks)


def peers(plan: StepPlan) -> Ints:
    """Return the number of distinct ranks that each rank sends to or receives from, [P]."""
    return _peers(plan.micro_start, plan.shard_start, plan.shard_order, *neighbours(plan))


@njit(cache=True)
def part_tokens(size: int, longer: int, degree: int, part: int) -> int:
    """Return a shard's tokens: chunks `part` and 2D-1-part of 2D, `longer` of them size + 1 (schedule.shard_spans)."""
    return 2 * size + int(part < longer) + int(2 * degree - 1 - part < longer)


@njit(cache=True)
def _tokens(lengths: Ints, ring_start: Ints) -> Ints:
    tokens = np.empty(ring_start[-1], np.int64)
    for sequence in range(len(lengths)):
        first, degree = ring_start[sequence], ring_start[sequence + 1] - ring_start[sequence]
        size, longer = divmod(lengths[sequence], 2 * degree)
        for part in range(degree):
            tokens[first + part] = part_tokens(size, longer, degree, part)
    return tokens


@njit(cache=True)
def _pairs(lengths: Ints, ring_start: Ints) -> Ints:
    pairs = np.zeros(ring_start[-1], np.int64)
    for sequence in range(len(lengths)):
        first, degree = ring_start[sequence], ring_start[sequence + 1] - ring_start[sequence]
        size, longer = divmod(lengths[sequence], 2 * degree)
        for part in range(degree):
            for chunk in (part, 2 * degree - 1 - part):
                start = chunk * size + min(chunk, longer)
                stop = start + size + int(chunk < longer)
                pairs[first + part] += (stop * (stop + 1) - start * (start + 1)) // 2
    return pairs


@njit(cache=True)
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


@njit(cache=True)
def _neighbours(ring_start: Ints, ring_ranks: Ints) -> tuple[Ints, Ints]:
    target, source = np.full(len(ring_ranks), -1), np.full(len(ring_ranks), -1)
    for ring in range(len(ring_start) - 1):
        before = ring_start[ring + 1] - 1
        if before == ring_start[ring]:
            continue
        for shard in range(ring_start[ring], ring_start[ring + 1]):
            target[before] = ring_ranks[shard]
            source[shard] = ring_ranks[before]
            before = shard
    return target, source


@njit(cache=True)
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
