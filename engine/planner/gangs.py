"""Gangs: micro-batches that share rings, directly or through others, and so run at the same time."""

from __future__ import annotations

import numpy as np

from engine.planner.plan import Ints


def components(shard_micro: Ints, ring_start: Ints, micro_batches: int) -> Ints:
    """Return for each micro-batch the smallest number of those connected with it through rings, [M].

    `shard_micro` [K] is the micro-batch of each shard; the shards of ring s are ring_start[s] .. ring_start[s + 1].
    Each pass hooks the labels of a ring's members to their smallest and then jumps to the label's own label, so that
    a long chain of rings takes few passes.
    """
    label = np.arange(micro_batches, dtype=np.int64)
    degrees = np.diff(ring_start)
    while True:
        before = label[shard_micro]
        smallest = np.repeat(np.minimum.reduceat(before, ring_start[:-1]), degrees)
        hooked = label.copy()
        np.minimum.at(hooked, before, smallest)
        np.minimum.at(hooked, shard_micro, smallest)
        hooked = hooked[hooked]
        if np.array_equal(hooked, label):
            return label
        label = hooked
