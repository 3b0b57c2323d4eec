"""The compiled loops of `verify`, one pass over the plan each: the first place that breaks a rule, or -1.

They read plans whose arrays are well-formed (rule 0, rows.py). Letters: P ranks, K shards, M micro-batches (plan.py).
"""

from __future__ import annotations

import numpy as np

from engine.compiled import kernel
from engine.planner.plan import Ints
from engine.planner.rows import following


@kernel
def not_once(shard_order: Ints) -> int:
    """Return the first shard that is in several micro-batches; if there is none, every shard is in one."""
    held = np.zeros(len(shard_order), np.bool_)
    for shard in shard_order:
        if held[shard]:
            return shard
        held[shard] = True
    return -1


@kernel
def astray(micro_start: Ints, shard_start: Ints, shard_order: Ints, ring_ranks: Ints) -> int:
    """Return the first place in `shard_order` whose shard is on another rank than its ring says."""
    for rank in range(len(micro_start) - 1):
        for place in range(shard_start[micro_start[rank]], shard_start[micro_start[rank + 1]]):
            if ring_ranks[shard_order[place]] != rank:
                return place
    return -1


@kernel
def twice_in_row(start: Ints, values: Ints, end: int) -> int:
    """Return the first place whose value, one of 0 .. end - 1, stands before it in the same row."""
    latest = np.full(end, -1)  # by value: the row of its latest place
    for row in range(len(start) - 1):
        for place in range(start[row], start[row + 1]):
            if latest[values[place]] == row:
                return place
            latest[values[place]] = row
    return -1


@kernel
def other_gang(gang: Ints, label: Ints) -> int:
    """Return the first micro-batch whose gang differs from another's that rings connect with it (`label` [M])."""
    for micro in range(len(gang)):
        if gang[micro] != gang[label[micro]]:
            return micro
    return -1


@kernel
def mixed_gang(gang: Ints, values: Ints) -> int:
    """Return the first micro-batch whose gang has one before it of another value, [M]; values are not negative."""
    found = np.full(len(gang), -1)  # by gang
    for micro in range(len(gang)):
        if found[gang[micro]] < 0:
            found[gang[micro]] = values[micro]
        elif found[gang[micro]] != values[micro]:
            return micro
    return -1


@kernel
def out_of_order(slot: Ints, micro_start: Ints) -> int:
    """Return the first micro-batch whose slot is not its place among those of its rank."""
    for rank in range(len(micro_start) - 1):
        for micro in range(micro_start[rank], micro_start[rank + 1]):
            if slot[micro] != micro - micro_start[rank]:
                return micro
    return -1


@kernel
def crossed(ring_start: Ints, ring_ranks: Ints, shard_order: Ints, ranks: int) -> int:
    """Return the first shard that its rank sends to another before one that it receives later.

    Shards come rank by rank, in the order in which each runs them. So for a sender and each of its receivers the places
    at which these receive must ascend.
    """
    place = np.empty(len(shard_order), np.int64)
    for at in range(len(shard_order)):
        place[shard_order[at]] = at
    after = following(ring_start)
    sender, latest = np.full(ranks, -1), np.zeros(ranks, np.int64)  # by receiver: the rank that `latest` is of
    for shard in shard_order:
        if after[shard] == shard:
            continue
        source, target = ring_ranks[shard], ring_ranks[after[shard]]
        if sender[target] == source and place[after[shard]] < latest[target]:
            return shard
        sender[target], latest[target] = source, place[after[shard]]
    return -1
