"""The memory budget of a micro-batch: how many tokens fit, and what fraction of activations must be offloaded.

The planner and engine/fit, which imports the planner, both need this arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from engine.cost.model import Costs
from engine.units import PPM, Bools, Ints

_MOST_TOKENS = 2**35  # most tokens of a step (verify.py)
_MOST_BYTES = 2**62  # sums of more would overflow 64 bits
_AT_ONCE = 64  # sizes that `most_tokens` tries at once


class Budget(NamedTuple):
    """The memory of a rank, and how much it may offload."""

    memory: int  # bytes of its device that tensors may use
    host: int  # bytes of host memory minus the model states there; negative if these do not fit
    offload: int  # largest allowed offload ratio, ppm
    named: int = 0  # offload ratio for which the host must have memory even if a smaller one is enough, ppm


def least_ratio(
    costs: Costs, tokens: Ints, buffers: Ints, capacity: Ints, memory: Ints, largest: Ints | None = None
) -> Ints:
    """Smallest offload ratio, in ppm, at which micro-batches fit; all arguments and the result are [M].

    `capacity` and `memory` may also be [1].

    A micro-batch of `tokens` fits if the tokens that stay on the device (`Costs.resident`) are at most `capacity`, and
    its bytes at most `memory`. `buffers` are the tokens of the ring buffers (`ring_tokens` of `Costs.peak_bytes`). The
    working set is that of a micro-batch of `largest` tokens, if given, else its own. The ratio is 0 if a micro-batch
    fits without offload, and PPM if no ratio is enough.
    """
    largest = tokens if largest is None else largest
    if costs.later_stages:
        each = (least_ratio(stage, tokens, buffers, capacity, memory, largest) for stage in costs.stages)
        return np.maximum.reduce(list(each))
    ratio = np.zeros(len(tokens), dtype=np.int64)
    available = memory - costs.fixed_bytes - costs.ring_bytes * buffers
    stays = np.minimum(capacity, (available - costs.working(largest)) // costs.token_bytes)
    large = np.flatnonzero((tokens > 0) & (tokens > stays))
    if len(large) == 0 or costs.layers <= 2:
        return ratio
    kept = stays[large] * costs.layers * PPM // tokens[large]
    ratio[large] = np.minimum(PPM, PPM - (kept - 2 * PPM) // (costs.layers - 2))
    return ratio


def least(costs: Costs, tokens: int, capacity: int, memory: int) -> int:
    """Smallest offload ratio, in ppm, at which one micro-batch of `tokens`, all in rings, fits (`least_ratio`)."""
    row = np.array([[tokens], [tokens], [capacity], [memory]], dtype=np.int64)
    return int(least_ratio(costs, *row)[0])


def most_ratio(costs: Costs, tokens: Ints, host: int) -> Ints:
    """Largest offload ratio, in ppm, at which the offloaded activations of each micro-batch fit in `host` bytes, [M].

    The micro-batches have `tokens` [M].
    """
    if costs.later_stages:
        return np.minimum.reduce([most_ratio(stage, tokens, host) for stage in costs.stages])
    if costs.layers <= 2:
        return np.full(len(tokens), PPM, dtype=np.int64)
    stays = np.maximum(0, tokens - max(0, host) // costs.token_bytes)  # tokens that must stay in all layers
    kept = np.where(stays > 0, (stays - 1) * costs.layers * PPM // np.maximum(1, tokens) + 1, 0)
    return np.clip(PPM - -(-(kept - 2 * PPM) // (costs.layers - 2)), 0, PPM)


def fits(costs: Costs, tokens: int, budget: Budget, capacity: int | None = None) -> bool:
    """Whether a micro-batch of `tokens`, all in rings, fits with the smallest offload ratio that is enough.

    With a `capacity`, at most that many tokens may stay on the device. If `tokens` fit, fewer tokens fit too.
    """
    if costs.token_bytes * tokens >= _MOST_BYTES:
        return False
    return bool(_fit(costs, np.array([tokens], dtype=np.int64), budget, capacity)[0])


def _fit(costs: Costs, tokens: Ints, budget: Budget, capacity: int | None) -> Bools:
    """`fits` for each of several micro-batches of `tokens` [M], all below `_MOST_BYTES`: [M]."""
    stays, memory = tokens if capacity is None else np.full_like(tokens, capacity), np.full_like(tokens, budget.memory)
    ratio = np.minimum(budget.offload, least_ratio(costs, tokens, tokens, stays, memory))
    on_device = (costs.resident(tokens, ratio) <= stays) & (costs.peak_bytes(tokens, tokens, ratio) <= memory)
    fit: Bools = on_device & (costs.host_bytes(tokens, np.maximum(budget.named, ratio)) <= budget.host)
    return fit


def most_tokens(costs: Costs, budget: Budget, capacity: int | None = None) -> int:
    """Most tokens of one micro-batch, all in rings, that fit within the budget (`fits`); 0 if none."""
    most = min(_MOST_TOKENS, (_MOST_BYTES - 1) // max(1, costs.token_bytes))
    low, high = 0, most + 1
    tried = 2 ** np.arange(most.bit_length(), dtype=np.int64)
    while high - low > 1:
        # Many sizes at once: NumPy takes about as long for one. Those after the first that does not fit do not count.
        short = int(np.argmin(np.append(_fit(costs, tried, budget, capacity), False)))
        low, high = int(tried[short - 1]) if short else low, int(tried[short]) if short < len(tried) else high
        tried = np.unique(np.linspace(low + 1, high - 1, _AT_ONCE, dtype=np.int64))
    return low


def largest(holds: Callable[[int], bool], most: int) -> int:
    """Largest number from 1 to `most` for which `holds` is true, or 0. All smaller numbers must satisfy it too."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
