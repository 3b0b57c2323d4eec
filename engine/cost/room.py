"""How much of a micro-batch has to wait on the host, and how many tokens fit a device and its host then."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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


def most_ratio(costs: Costs, tokens: Ints, host: int) -> Ints:
    """Return the largest ratio, ppm, at which what waits of micro-batches fits the bytes of their host, [M]."""
    if costs.layers <= 2:
        return np.full(len(tokens), PPM, dtype=np.int64)
    stays = np.maximum(0, tokens - max(0, host) // costs.token_bytes)  # tokens of which all layers' has to stay
    share = np.where(stays > 0, (stays - 1) * costs.layers * PPM // np.maximum(1, tokens) + 1, 0)
    return np.clip(PPM - -(-(share - 2 * PPM) // (costs.layers - 2)), 0, PPM)


class Room(NamedTuple):
    """What a rank has for a micro-batch."""

    memory: int  # bytes of its device
    host: int  # bytes of its host, beside the model states there; negative where those do not fit
    offload: int  # most of what the middle layers save that may wait there, ppm
    named: int = 0  # of that, what the host has to have room for, needed or not


def fits(costs: Costs, tokens: int, room: Room, capacity: int | None = None) -> bool:
    """Return whether so many tokens fit with no more on the host than that takes; if it does, fewer fit too.

    With a `capacity` what stays of them must be no more than that, in tokens.
    """
    if costs.token_bytes * tokens >= _MOST_BYTES:
        return False
    stays, number = tokens if capacity is None else capacity, np.int64(tokens)
    ratio = min(room.offload, least(costs, tokens, stays, room.memory))
    return (
        int(costs.resident(number, ratio)) <= stays
        and int(costs.peak_bytes(number, number, ratio)) <= room.memory
        and int(costs.host_bytes(number, max(room.named, ratio))) <= room.host
    )


def most_tokens(costs: Costs, room: Room, capacity: int | None = None) -> int:
    """Return the most tokens that fit so; 0 if none do."""
    return largest(lambda tokens: fits(costs, tokens, room, capacity), _MOST_TOKENS)


def largest(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` for which all is well, if it is for all smaller ones; 0 if for none."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
