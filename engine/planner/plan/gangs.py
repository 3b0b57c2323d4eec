"""Gangs: micro-batches that share rings, directly or through other micro-batches, and so must run at the same time."""

from __future__ import annotations

import numpy as np

from engine.compiled import njit
from engine.units import Bools, Ints


@njit
def components(shard_micro: Ints, ring_start: Ints, micro_batches: int) -> Ints:
    """Label each micro-batch with the smallest micro-batch that rings connect it to, directly or not, [M].

    `shard_micro` [K] is the micro-batch of each shard; ring s has the shards ring_start[s] .. ring_start[s + 1] - 1.
    Union-find: each micro-batch points to a smaller one of its component, and the smallest points to itself.
    """
    smaller = np.arange(micro_batches)
    for ring in range(len(ring_start) - 1):
        root = _root(smaller, shard_micro[ring_start[ring]])
        for shard in range(ring_start[ring] + 1, ring_start[ring + 1]):
            other = _root(smaller, shard_micro[shard])
            smaller[max(root, other)] = min(root, other)
            root = min(root, other)
    for micro in range(micro_batches):  # ascending, so smaller[micro] already points to its root
        smaller[micro] = smaller[smaller[micro]]
    return smaller


@njit
def numbered(label: Ints, order: Ints) -> Ints:
    """Renumber components 0, 1, ...: returns the number of each micro-batch's component, [M].

    `label` [M] comes from `components`. Numbers follow the order in which `order` [M] first reaches each component.
    """
    number = np.full(len(label), -1)
    gang = np.empty(len(label), np.int64)
    count = 0
    for micro in order:
        if number[label[micro]] < 0:
            number[label[micro]] = count
            count += 1
        gang[micro] = number[label[micro]]
    return gang


@njit
def alone(gang: Ints) -> Bools:
    """Return whether each micro-batch is the only one of its gang, so that it shares no ring, [M]."""
    members = np.zeros(len(gang), np.int64)
    for number in gang:
        members[number] += 1
    return members[gang] == 1


@njit
def ends_alone(gang: Ints, micro_start: Ints) -> Ints:
    """Return 1 for each rank whose last micro-batch shares no ring, else 0, [P]."""
    return alone(gang)[micro_start[1:] - 1].astype(np.int64)


@njit
def _root(smaller: Ints, micro: int) -> int:
    """The smallest micro-batch of the component of `micro`."""
    while smaller[micro] != micro:
        smaller[micro] = smaller[smaller[micro]]  # halve the path for later look-ups
        micro = smaller[micro]
    return micro
