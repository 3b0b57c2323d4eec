"""Gangs: micro-batches that share rings, directly or through others, and so run at the same time."""

from __future__ import annotations

import numpy as np

from engine.compiled import kernel
from engine.planner.plan import Ints


@kernel
def components(shard_micro: Ints, ring_start: Ints, micro_batches: int) -> Ints:
    """Return for each micro-batch the smallest number of those connected with it through rings, [M].

    `shard_micro` [K] is the micro-batch of each shard; the shards of ring s are ring_start[s] .. ring_start[s + 1].
    Union-find: a micro-batch points to a smaller one of its component, the smallest to itself.
    """
    smaller = np.arange(micro_batches)
    for ring in range(len(ring_start) - 1):
        root = _root(smaller, shard_micro[ring_start[ring]])
        for shard in range(ring_start[ring] + 1, ring_start[ring + 1]):
            other = _root(smaller, shard_micro[shard])
            smaller[max(root, other)] = min(root, other)
            root = min(root, other)
    for micro in range(micro_batches):  # ascending, so what it points to is a root's already
        smaller[micro] = smaller[smaller[micro]]
    return smaller


@kernel
def numbered(label: Ints, order: Ints) -> Ints:
    """Return the components' numbers, [M], from 0 on in the order in which `order` meets them."""
    number = np.full(len(label), -1)
    gang = np.empty(len(label), np.int64)
    count = 0
    for micro in order:
        if number[label[micro]] < 0:
            number[label[micro]] = count
            count += 1
        gang[micro] = number[label[micro]]
    return gang


@kernel
def _root(smaller: Ints, micro: int) -> int:
    while smaller[micro] != micro:
        smaller[micro] = smaller[smaller[micro]]  # halves the way for the next time
        micro = smaller[micro]
    return micro
