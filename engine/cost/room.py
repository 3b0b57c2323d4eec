"""How much of a micro-batch has to wait on the host, and how many tokens fit a device and its host then."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.cost.model import PPM, Costs

Ints = NDArray[np.int64]
_MOST_TOKENS = 2**35  # of a step (verify.py)
_MOST_BYTES = 2**62  # beyond it 64 bits pass over


def least_ratio(costs: Costs, tokens: Ints, buffers: Ints, capacity: Ints, memory: Ints) -> Ints:
    """Return the least ratio, ppm, at which micro-batches fit a capacity in tokens and a memory in bytes; all [M].

    0 where one fits whole; PPM where none is enough. `buffers` are the tokens of ring buffers (`Costs.peak_bytes`).
    """
    ratio = np.zeros(len(tokens), dtype=np.int64)
    free = memory - costs.fixed_bytes - costs.working(tokens) - costs.ring_bytes * buffers
    large = np.flatnonzero((tokens > 0) & ((tokens > capacity) | (costs.token_bytes * tokens > free)))
    if len(large) == 0 or costs.layers <= 2:
        return ratio
    stays = np.minimum(capacity[large], free[large] // costs.token_bytes)
    share = stays * costs.layers * PPM // tokens[large]
    ratio[large] = np.minimum(PPM, PPM - (share - 2 * PPM) // (costs.layers - 2))
    return ratio


def least(costs: Costs, tokens: int, capacity: int, memory: int) -> int:
    """Return `least_ratio` of one micro-batch, all of it in rings."""
    row = np.array([[tokens], [tokens], [capacity], [memory]], dtype=np.int64)
    return int(least_ratio(costs, *row)[0])


def fits(costs: Costs, tokens: int, memory: int, offload: int, host: int) -> bool:
    """Return whether so many tokens fit with as much on the host, `offload` ppm of them at most, as that takes."""
    if costs.token_bytes * tokens >= _MOST_BYTES:
        return False
    number, ratio = np.int64(tokens), min(offload, least(costs, tokens, tokens, memory))
    return int(costs.peak_bytes(number, number, ratio)) <= memory and int(costs.host_bytes(number, ratio)) <= host


def most_tokens(costs: Costs, memory: int, offload: int, host: int) -> int:
    """Return the most tokens that fit so; at least those that fit with nothing on the host."""
    low = costs.most_tokens(memory)
    if not offload or costs.layers <= 2:
        return low
    high = max(1, low)
    while high <= _MOST_TOKENS and fits(costs, high, memory, offload, host):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(costs, middle, memory, offload, host) else (low, middle)
    return low
