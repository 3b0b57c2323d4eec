"""Compiled parts of the rules of `verify`: each finds the first violation of one condition, or returns -1.

The arrays are those of a plan (step_plan.py). Compiled code does not check bounds: arrays that are used as indices must
be in range (rule 0).
"""

from __future__ import annotations

import numpy as np

from engine.compiled import njit, njit_in_place
from engine.units import Ints


@njit_in_place
def uneven_team(ring_start: Ints, team: Ints) -> int:
    """Return the first slice whose team does not divide the degree of its ring, or -1."""
    for at in range(len(team)):
        if team[at] != 1 and (ring_start[at + 1] - ring_start[at]) % team[at] != 0:
            return at
    return -1


@njit_in_place
def gap_before(before: Ints, lengths: Ints) -> int:
    """Return the first slice that is not the first one of its sequence and does not follow the one before it, or -1."""
    for at in range(len(before)):
        if before[at] != 0 and (at == 0 or before[at] != before[at - 1] + lengths[at - 1]):
            return at
    return -1


@njit
def not_once(items: Ints) -> int:
    """Return the first number of 0 .. N - 1 that is not once in `items` [N], or -1."""
    times = np.zeros(len(items), np.int64)
    for item in items:
        times[item] += 1
    for item in range(len(items)):
        if times[item] != 1:
            return item
    return -1


@njit_in_place
def on_other_rank(micro_start: Ints, shard_start: Ints, shard_order: Ints, ring_ranks: Ints) -> int:
    """Return the first shard that is in a micro-batch of another rank than its own, or -1."""
    first = len(ring_ranks)
    for rank in range(len(micro_start) - 1):
        for place in range(shard_start[micro_start[rank]], shard_start[micro_start[rank + 1]]):
            if ring_ranks[shard_order[place]] != rank:
                first = min(first, shard_order[place])
    return first if first < len(ring_ranks) else -1


@njit_in_place
def above(values: Ints, bounds: Ints, micro_start: Ints) -> int:
    """Return the first micro-batch whose entry in `values` [M] is above its rank's entry in `bounds` [P], or -1."""
    for rank in range(len(bounds)):
        for micro in range(micro_start[rank], micro_start[rank + 1]):
            if values[micro] > bounds[rank]:
                return micro
    return -1


@njit_in_place
def not_of_label(values: Ints, label: Ints) -> int:
    """Return the first micro-batch whose entry in `values` [M] is not that of micro-batch `label` [M], or -1."""
    for micro in range(len(values)):
        if values[micro] != values[label[micro]]:
            return micro
    return -1


@njit
def differs_within_gang(gang: Ints, values: Ints) -> int:
    """Return the first micro-batch whose entry in `values` [M] is not that of the first one in its gang, or -1."""
    first = np.full(len(gang), -1)  # by gang
    for micro in range(len(gang)):
        if first[gang[micro]] < 0:
            first[gang[micro]] = micro
        elif values[micro] != values[first[gang[micro]]]:
            return micro
    return -1


@njit_in_place
def out_of_slot(slot: Ints, micro_start: Ints) -> int:
    """Return the first micro-batch whose slot is not its place among those of its rank, or -1."""
    for rank in range(len(micro_start) - 1):
        for micro in range(micro_start[rank], micro_start[rank + 1]):
            if slot[micro] != micro - micro_start[rank]:
                return micro
    return -1


@njit
def duplicate_in_row(start: Ints, values: Ints, end: int) -> int:
    """Return the first index of a value that occurs earlier in the same row, or -1.

    Row i is values[start[i] : start[i + 1]]; values must be in 0 .. end - 1.
    """
    latest = np.full(end, -1)  # by value: the last row with this value
    for row in range(len(start) - 1):
        for place in range(start[row], start[row + 1]):
            if latest[values[place]] == row:
                return place
            latest[values[place]] = row
    return -1


@njit
def crossed_shard(
    next_shard: Ints, ring_ranks: Ints, shard_order: Ints, shard_micro: Ints, ranks: int
) -> tuple[int, int]:
    """Return the first shard that its micro-batch sends after one that the receiver expects later, or -1, and the turn.

    Shard k is sent to the ranks of the shards next_shard[:, k], one for each turn, all at once. `shard_order` lists
    shards in the order in which micro-batches send them. So for a micro-batch and each of its receivers, the places at
    which the receiver has the next shards must ascend.
    """
    place = np.empty(len(shard_order), np.int64)
    for at in range(len(shard_order)):
        place[shard_order[at]] = at
    sender, latest = np.full(ranks, -1), np.zeros(ranks, np.int64)  # by receiver: the micro-batch of `latest`
    for shard in shard_order:
        for turn in range(len(next_shard)):
            following = next_shard[turn, shard]
            if following == shard:
                continue
            source, target = shard_micro[shard], ring_ranks[following]
            if sender[target] == source and place[following] < latest[target]:
                return shard, turn
            sender[target], latest[target] = source, place[following]
    return -1, 0


@njit
def stranger(ring_ranks: Ints, near: Ints, named: Ints) -> tuple[int, int]:
    """Return the first shard k and n such that its rank and near[k, n] differ, and neither names the other; or -1, 0.

    Rank r names the ranks named[r].
    """
    for shard in range(len(near)):
        rank = ring_ranks[shard]
        for at in range(near.shape[1]):
            other, found = near[shard, at], near[shard, at] == rank
            for place in range(named.shape[1]):
                found = found or named[rank, place] == other or named[other, place] == rank
            if not found:
                return shard, at
    return -1, 0
