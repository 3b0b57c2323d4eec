"""Tokens and attention work of the shards and micro-batches of a plan, and the peers of its ranks.

The arrays of the plan must be well-formed (rule 0 of `verify`).
Letters: S sequences, P ranks, K shards, M micro-batches (step_plan.py).
"""

from __future__ import annotations

import numpy as np

from engine.compiled import njit
from engine.planner.plan.schedule import chunk_start
from engine.planner.plan.step_plan import StepPlan
from engine.units import Ints


def shard_loads(plan: StepPlan) -> tuple[Ints, Ints]:
    """Return the tokens and the (query, key) pairs of each shard, [K] each: the query at position p has p + 1 keys."""
    return _shard_loads(plan.lengths, plan.ring_start)


def micro_tokens(plan: StepPlan) -> Ints:
    """Return the tokens of each micro-batch, [M]."""
    return micro_loads(plan)[0]


def micro_loads(plan: StepPlan) -> tuple[Ints, Ints]:
    """Return the tokens of each micro-batch, [M], and the tokens that its ring buffers hold, [M].

    A ring's buffers must fit the shard of any member, so each ring adds the tokens of its largest shard.
    """
    return _micro_loads(plan.lengths, plan.ring_start, plan.shard_micro, plan.micro_batches)


def peers(plan: StepPlan) -> Ints:
    """Return the number of distinct ranks that each rank sends to or receives from, [P]."""
    target = plan.ring_ranks[plan.next_shard]
    source = np.empty_like(target)
    source[plan.next_shard] = plan.ring_ranks
    return _peers(plan.micro_start, plan.shard_start, plan.shard_order, target, source)


@njit
def _shard_loads(lengths: Ints, ring_start: Ints) -> tuple[Ints, Ints]:
    """Compiled part of `shard_loads`: tokens and (query, key) pairs of each shard, [K] each."""
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


@njit
def _micro_loads(lengths: Ints, ring_start: Ints, shard_micro: Ints, micro_batches: int) -> tuple[Ints, Ints]:
    """Compiled part of `micro_loads`: tokens, and tokens of ring buffers, of each micro-batch, [M] each."""
    tokens, buffers = np.zeros(micro_batches, np.int64), np.zeros(micro_batches, np.int64)
    for sequence in range(len(lengths)):
        first, degree = ring_start[sequence], ring_start[sequence + 1] - ring_start[sequence]
        if degree == 1:  # the most frequent case, and integer divisions are slow
            tokens[shard_micro[first]] += lengths[sequence]
            continue
        size, longer = divmod(lengths[sequence], 2 * degree)
        for part in range(degree):
            micro = shard_micro[first + part]
            tokens[micro] += 2 * size + int(part < longer) + int(2 * degree - 1 - part < longer)
            buffers[micro] += -(-lengths[sequence] // degree)
    return tokens, buffers


@njit
def _peers(micro_start: Ints, shard_start: Ints, shard_order: Ints, target: Ints, source: Ints) -> Ints:
    """Count the peers of each rank, [P]: the rank of shard k sends to target[k] and receives from source[k]."""
    ranks = len(micro_start) - 1
    counted_by = np.full(ranks, -1)  # by peer: the last rank that counted it
    count = np.zeros(ranks, np.int64)
    for rank in range(ranks):
        for place in range(shard_start[micro_start[rank]], shard_start[micro_start[rank + 1]]):
            for peer in (target[shard_order[place]], source[shard_order[place]]):
                if peer != rank and counted_by[peer] != rank:
                    counted_by[peer] = rank
                    count[rank] += 1
    return count
