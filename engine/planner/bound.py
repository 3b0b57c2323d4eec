"""The least time in which a step can be done, and the ring degrees that would do it.

The bound is the smallest T with  sum over s of min{ w(D) t(s, D) : t(s, D) <= T } <= P T,  where t(s, D) is the true
time of sequence s on a ring of D, w(D) and P are the speed of the ring's and of all ranks together: no rank is ever
idle, and each sequence takes the cheapest ring that is done by T. A ring runs at its slowest member, so it has kind k
of ranks, one at least, and faster ones only where these are not enough. (Its shards are taken as even: a slow rank
that holds a token less than others is not seen.)
A micro-batch's fixed cost is counted in two ways, and the larger bound holds: it is shared out by its tokens, as many
as the largest rank holds pay for one (no planner packs whole sequences beyond that, although offload would allow it);
or each rank pays for one, its `first`. Found by bisection.
Letters: S sequences in descending order of length, P ranks, K kinds of ranks by speed.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Kinds(NamedTuple):
    """Ranks by speed, the fastest first, [K]."""

    slow: Floats  # how many times slower than full speed
    upto: Ints  # ranks of this kind and of faster ones


def kinds_of(slow: Floats) -> Kinds:
    """Return the kinds of ranks that are so many times slower than full speed, [P]."""
    found, count = np.unique(slow, return_counts=True)
    return Kinds(found, np.cumsum(count))


@kernel
def bound(rates: Rates, lengths: Ints, floors: Ints, share: float, first: float, node: int, kinds: Kinds) -> float:
    """Return the bound, ns, of sequences whose least degrees are `floors` [S].

    A micro-batch costs `share` a token of a rank of full speed, or `first`, once.
    """
    count, last = len(lengths), len(kinds.slow) - 1
    works = np.full(count, np.inf)  # of sequences on their least rings
    times = np.zeros(count)  # the longest of these
    for kind in range(last + 1):
        slow, own = kinds.slow[kind], _slowed(rates, kinds.slow[kind])
        for at in range(count):
            time = ring_time(own, float(lengths[at]), floors[at], node, share * slow)
            times[at] = max(times[at], time)
            if floors[at] <= kinds.upto[kind]:
                works[at] = min(works[at], time * _power(kinds, floors[at], kind))
    rest = np.append(np.cumsum(works[::-1])[::-1], 0.0)  # work from here on
    peak = np.zeros(count + 1)  # the longest time from here on
    for at in range(count - 1, -1, -1):
        peak[at] = max(peak[at + 1], times[at])
    power = _power(kinds, kinds.upto[last], last)
    most = (rest[0] + first * kinds.upto[last]) / power
    low, high = rest[0] / power, max(most, peak[0] + first * kinds.slow[last])
    while high - low > _NEAR * high:
        middle = (low + high) / 2.0
        work = _firsts(kinds, first, middle)
        for at in range(count):
            if peak[at] + first * kinds.slow[last] <= middle:
                work += rest[at]
                break
            if times[at] + first * kinds.slow[last] <= middle:
                work += works[at]
            else:
                work += _least_work(rates, float(lengths[at]), floors[at], share, first, node, kinds, middle)
        if work <= power * middle:
            high = middle
        else:
            low = middle
    return high


@kernel
def _least_work(
    rates: Rates, tokens: float, floor: int, share: float, first: float, node: int, kinds: Kinds, limit: float
) -> float:
    """Return the least work of a sequence that is done in time, ns of a rank of full speed; infinite if none is."""
    least = np.inf
    for kind in range(len(kinds.slow)):
        slow, most = kinds.slow[kind], kinds.upto[kind]
        if floor > most:
            continue
        own = _slowed(rates, slow)
        degree = least_degree(own, tokens, floor, most, node, share * slow, limit - first * slow)
        if degree > 0:
            time = ring_time(own, tokens, degree, node, share * slow)
            least = min(least, time * _power(kinds, degree, kind))
    return least


@kernel
def _power(kinds: Kinds, degree: int, kind: int) -> float:
    """Return the speed of the `degree` slowest ranks of a kind and of faster ones together."""
    power, left = 0.0, degree
    for one in range(kind, -1, -1):
        own = min(left, kinds.upto[one] - (kinds.upto[one - 1] if one > 0 else 0))
        power += own / kinds.slow[one]
        left -= own
    return power


@kernel
def _firsts(kinds: Kinds, first: float, limit: float) -> float:
    """Return what all ranks spend on their first micro-batch, or lose if they have none."""
    work, before = 0.0, 0
    for kind in range(len(kinds.slow)):
        work += (kinds.upto[kind] - before) * min(first, limit / kinds.slow[kind])
        before = kinds.upto[kind]
    return work


@kernel
def _slowed(rates: Rates, slow: float) -> Rates:
    """Return the rates of a rank that computes so many times slower; its links are as fast as others'."""
    return Rates(
        rates.token_f * slow,
        rates.token_b * slow,
        rates.pair_f * slow,
        rates.pair_b * slow,
        rates.micro * slow,
        rates.sequence * slow,
        rates.round * slow,
        rates.merge * slow,
        rates.latency,
        rates.kv,
        rates.dkv,
        rates.far,
        rates.overlap,
        rates.again,
        rates.copy,
    )
