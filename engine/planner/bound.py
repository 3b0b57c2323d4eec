"""The least time in which a step can be done, and the ring degrees that would do it.

The bound is the smallest T with  sum over s of min{ D t(s, D) : t(s, D) <= T } <= P T,  where t(s, D) is the true
time of sequence s on a ring of D: no rank is ever idle, and each sequence takes the cheapest ring that is done by T. A
micro-batch's fixed cost is shared out by its tokens: as many as the largest rank holds pay for one (no planner packs
whole sequences beyond that, although offload would allow it). Found by bisection.
Letters: S sequences in descending order of length, P ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.compiled import kernel
from engine.cost.times import Rates, shared
from engine.planner.plan import Ints

Floats = NDArray[np.float64]
_NEAR = 1e-4  # relative width at which the bisection ends


@kernel
def ring_time(rates: Rates, tokens: float, degree: int, node: int, share: float) -> float:
    """Return t(s, D), inside a node if it fits there, with its share of a micro-batch's fixed cost: all at most."""
    far = rates.far if degree > node else 1.0
    return shared(rates, tokens, degree, far) + min(share * tokens / degree, rates.micro)


@kernel
def least_degree(rates: Rates, tokens: float, floor: int, most: int, node: int, share: float, limit: float) -> int:
    """Return the least degree from `floor` on whose time is at most `limit`, or 0 if none is.

    Times fall with the degree until transfers or latency govern, inside a node and again beyond it.
    """
    if ring_time(rates, tokens, floor, node, share) <= limit:
        return floor
    if floor < node:
        high = fastest(rates, tokens, floor, min(node, most), node, share)
        if ring_time(rates, tokens, high, node, share) <= limit:
            return _between(rates, tokens, floor, high, node, share, limit)
    low = max(floor, node + 1)
    if low > most:
        return 0
    high = fastest(rates, tokens, low, most, node, share)
    if ring_time(rates, tokens, high, node, share) > limit:
        return 0
    return _between(rates, tokens, low - 1, high, node, share, limit)


@kernel
def fastest(rates: Rates, tokens: float, low: int, high: int, node: int, share: float) -> int:
    """Return the degree in low .. high, all inside a node or all beyond it, whose time is the least."""
    while low < high:
        middle = (low + high) // 2
        if ring_time(rates, tokens, middle + 1, node, share) < ring_time(rates, tokens, middle, node, share):
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def _between(rates: Rates, tokens: float, low: int, high: int, node: int, share: float, limit: float) -> int:
    """Return the least degree above `low` that keeps the limit, where `high` does and times fall."""
    while high - low > 1:
        middle = (low + high) // 2
        if ring_time(rates, tokens, middle, node, share) <= limit:
            high = middle
        else:
            low = middle
    return high


@kernel
def bound(rates: Rates, lengths: Ints, floors: Ints, share: float, node: int, ranks: int, power: float) -> float:
    """Return the bound, ns, of sequences whose least degrees are `floors` [S]; `power` is the ranks' speed together."""
    count = len(lengths)
    costs = np.empty(count)
    rest = np.zeros(count + 1)  # the work of sequences from here on, each on its least ring
    peak = np.zeros(count + 1)  # the longest time of those
    for at in range(count - 1, -1, -1):
        least = ring_time(rates, float(lengths[at]), floors[at], node, share)
        costs[at] = least
        rest[at] = rest[at + 1] + least * floors[at]
        peak[at] = max(peak[at + 1], least)
    low, high = rest[0] / power, max(rest[0] / power, peak[0])
    while high - low > _NEAR * high:
        middle = (low + high) / 2.0
        if _work(rates, lengths, floors, share, node, ranks, middle, costs, rest, peak) <= power * middle:
            high = middle
        else:
            low = middle
    return high


@kernel
def _work(
    rates: Rates,
    lengths: Ints,
    floors: Ints,
    share: float,
    node: int,
    ranks: int,
    limit: float,
    costs: Floats,
    rest: Floats,
    peak: Floats,
) -> float:
    """Return the least work with no sequence longer than `limit`; infinite if some cannot be."""
    work = 0.0
    for at in range(len(lengths)):
        if peak[at] <= limit:
            return work + rest[at]
        degree, time = floors[at], costs[at]
        if time > limit:
            degree = least_degree(rates, float(lengths[at]), floors[at], ranks, node, share, limit)
            if degree == 0:
                return np.inf
            time = ring_time(rates, float(lengths[at]), degree, node, share)
        work += degree * time
    return work
