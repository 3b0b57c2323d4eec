"""A lower bound of the time of a step, and searches for the ring degree of a sequence.

The bound is the smallest T with

    sum over s of min{ w(D) t(s, D) : t(s, D) <= T }  <=  W T

found by bisection. t(s, D) is the time of sequence s on a ring of degree D; w(D) is the total speed of the ring's
ranks, and W that of all ranks (D and P if all ranks run at full speed). So the bound assumes that no rank is ever idle,
and gives each sequence the cheapest ring that finishes within T.

- Ranks of unequal speed: a ring runs at the speed of its slowest member. So for each kind k of ranks, the cheapest ring
  whose slowest member is of kind k has as many ranks of kind k as possible, and faster ones only where these do not
  suffice. All shards of a ring count as equal, although one on a slow rank may have one token less.
- The fixed cost of a micro-batch is counted in one of two ways, and the caller takes the larger bound: spread over the
  tokens of a full micro-batch of the rank with the largest capacity (`per_token`; no planner packs unsplit sequences
  beyond the capacity, although offload would allow that), or once per rank (`first`).

Letters: S sequences in descending order of length, P ranks, K kinds of ranks by speed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import njit, njit_in_place
from engine.cost.times import Rates, shared
from engine.units import Floats, Ints

_TOLERANCE = 1e-4  # relative width at which the bisection ends


@njit_in_place
def ring_time(rates: Rates, tokens: float, degree: int, node: int, per_token: float) -> float:
    """Return the time, in ns, of one sequence of `tokens` tokens on a ring of `degree` full-speed ranks.

    This is t(s, D) of the lower bound, plus the shard's part of a micro-batch's fixed cost: `per_token` ns per token,
    but at most the whole cost. A ring of at most `node` ranks is inside a node, a larger one crosses nodes.
    """
    slowdown = rates.inter_node_slowdown if degree > node else 1.0
    return shared(rates, tokens, degree, slowdown) + min(per_token * tokens / degree, rates.micro)


@njit_in_place
def least_degree(rates: Rates, tokens: float, floor: int, most: int, node: int, per_token: float, limit: float) -> int:
    """Return the least degree in floor .. most at which `ring_time` is at most `limit` ns, or 0 if there is none.

    Inside a node, times fall with the degree until transfers or latency dominate; beyond a node, where links are
    slower, they do the same again. So each range is searched separately.
    """
    if ring_time(rates, tokens, floor, node, per_token) <= limit:
        return floor
    if floor < node:
        high = fastest(rates, tokens, floor, min(node, most), node, per_token)
        if ring_time(rates, tokens, high, node, per_token) <= limit:
            return _between(rates, tokens, floor, high, node, per_token, limit)
    low = max(floor, node + 1)
    if low > most:
        return 0
    high = fastest(rates, tokens, low, most, node, per_token)
    if ring_time(rates, tokens, high, node, per_token) > limit:
        return 0
    return _between(rates, tokens, low - 1, high, node, per_token, limit)


@njit_in_place
def least_degree_near(
    rates: Rates, tokens: float, floor: int, most: int, node: int, per_token: float, limit: float, near: int
) -> int:
    """Return `least_degree`, at once if it is `near`: sequences of similar length have the same one."""
    if not floor < near <= most or ring_time(rates, tokens, near, node, per_token) > limit:
        return least_degree(rates, tokens, floor, most, node, per_token, limit)
    first = node + 1 if near > node else floor  # the least degree of the range in which times fall, and then rise
    found = near == first or ring_time(rates, tokens, near - 1, node, per_token) > limit
    if found and near > node >= floor:  # then no ring inside a node may be fast enough: the largest is the fastest one
        last = ring_time(rates, tokens, node, node, per_token)
        found = last > limit and (node == floor or ring_time(rates, tokens, node - 1, node, per_token) > last)
    return near if found else least_degree(rates, tokens, floor, most, node, per_token, limit)


@njit_in_place
def fastest(rates: Rates, tokens: float, low: int, high: int, node: int, per_token: float) -> int:
    """Return the fastest degree in low .. high, which must all be inside a node or all beyond it."""
    while low < high:
        middle = (low + high) // 2
        if ring_time(rates, tokens, middle + 1, node, per_token) < ring_time(rates, tokens, middle, node, per_token):
            low = middle + 1
        else:
            high = middle
    return low


@njit_in_place
def _between(rates: Rates, tokens: float, low: int, high: int, node: int, per_token: float, limit: float) -> int:
    """Return the least degree in low + 1 .. high whose time is at most `limit` ns.

    Times must fall with the degree in this range, and the time of `high` must be at most `limit`.
    """
    while high - low > 1:
        middle = (low + high) // 2
        if ring_time(rates, tokens, middle, node, per_token) <= limit:
            high = middle
        else:
            low = middle
    return high


class Kinds(NamedTuple):
    """Kinds of ranks by speed, the fastest first."""

    slow: Floats  # [K] how many times slower than full speed
    upto: Ints  # [K] number of ranks of this kind and of faster kinds


def kinds_of(slow: Floats) -> Kinds:
    """Group ranks by `slow` [P]: how many times slower than full speed each rank is."""
    found, count = np.unique(slow, return_counts=True)
    return Kinds(found, np.cumsum(count))


@njit
def bound(rates: Rates, lengths: Ints, floors: Ints, per_token: float, first: float, node: int, kinds: Kinds) -> float:
    """Return the lower bound of the time of a step, in ns.

    `lengths` [S] are in descending order, `floors` [S] are the smallest degrees at which the sequences fit in memory,
    and `node` is the number of ranks of a node. The fixed cost of a micro-batch, at full speed, is `per_token` ns per
    token, or `first` ns once per rank.
    """
    count, last = len(lengths), len(kinds.slow) - 1
    works = np.full(count, np.inf)  # the least work of each sequence on a ring of its least degree
    times = np.zeros(count)  # the longest time on such a ring, over all kinds
    wide = count  # all further sequences fit on one rank
    while wide > 0 and floors[wide - 1] == 1:
        wide -= 1
    for kind in range(last + 1):
        slow, own = kinds.slow[kind], _slowed(rates, kinds.slow[kind])
        for at in range(wide):
            time = ring_time(own, float(lengths[at]), floors[at], node, per_token * slow)
            times[at] = max(times[at], time)
            if floors[at] <= kinds.upto[kind]:
                works[at] = min(works[at], time * _power(kinds, floors[at], kind))
        power = _power(kinds, 1, kind)
        for at in range(wide, count):
            time = ring_time(own, float(lengths[at]), 1, node, per_token * slow)
            times[at], works[at] = max(times[at], time), min(works[at], time * power)
    # The work, and the longest time, of all sequences from here on.
    rest, peak = np.zeros(count + 1), np.zeros(count + 1)
    for at in range(count - 1, -1, -1):
        rest[at], peak[at] = rest[at + 1] + works[at], max(peak[at + 1], times[at])
    power = _power(kinds, kinds.upto[last], last)
    most = (rest[0] + first * kinds.upto[last]) / power
    low, high = rest[0] / power, max(most, peak[0] + first * kinds.slow[last])
    degrees = np.zeros(last + 1, np.int64)
    # Bisects for the least T in which all ranks together can do the work of all sequences, each on its cheapest ring
    # that finishes within T.
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2.0
        # Each rank spends `first` on its first micro-batch, or idles for that long, but no longer than T.
        work, faster = 0.0, 0
        for kind in range(last + 1):
            work += (kinds.upto[kind] - faster) * min(first, middle / kinds.slow[kind])
            faster = kinds.upto[kind]
        for at in range(count):
            if peak[at] + first * kinds.slow[last] <= middle:  # this sequence and all that follow
                work += rest[at]
                break
            if work > power * middle:
                break
            if times[at] + first * kinds.slow[last] <= middle:
                work += works[at]
            else:
                tokens = float(lengths[at])
                work += _least_work(rates, tokens, floors[at], per_token, first, node, kinds, middle, degrees)
        if work <= power * middle:
            high = middle
        else:
            low = middle
    return high


@njit_in_place
def _least_work(
    rates: Rates,
    tokens: float,
    floor: int,
    per_token: float,
    first: float,
    node: int,
    kinds: Kinds,
    limit: float,
    degrees: Ints,
) -> float:
    """Return the least work of a sequence on a ring that ends by `limit` ns; inf if no ring does.

    Work is in ns on a full-speed rank. `degrees` [K] are those of a similar sequence for each kind; they are replaced.
    """
    least = np.inf
    for kind in range(len(kinds.slow)):
        slow, most = kinds.slow[kind], kinds.upto[kind]
        if floor > most:
            continue
        own = _slowed(rates, slow)
        ends = limit - first * slow
        degree = least_degree_near(own, tokens, floor, most, node, per_token * slow, ends, degrees[kind])
        if degree > 0:
            degrees[kind] = degree
            time = ring_time(own, tokens, degree, node, per_token * slow)
            least = min(least, time * _power(kinds, degree, kind))
    return least


@njit_in_place
def _power(kinds: Kinds, degree: int, kind: int) -> float:
    """Return the total speed of the `degree` slowest ranks among those of a kind and of faster kinds."""
    power, left = 0.0, degree
    for one in range(kind, -1, -1):
        own = min(left, kinds.upto[one] - (kinds.upto[one - 1] if one > 0 else 0))
        power += own / kinds.slow[one]
        left -= own
    return power


@njit_in_place
def _slowed(rates: Rates, slow: float) -> Rates:
    """Return the rates of a rank that computes `slow` times slower; its links keep their speed."""
    return Rates(
        rates.token_f * slow,
        rates.token_b * slow,
        rates.pair_f * slow,
        rates.pair_b * slow,
        rates.micro * slow,
        rates.sequence * slow,
        rates.round * slow,
        rates.ring * slow,
        rates.merge * slow,
        rates.latency,
        rates.kv,
        rates.dkv,
        rates.inter_node_slowdown,
        rates.overlap,
        rates.recompute_factor,
        rates.copy,
        rates.query,
        rates.result,
        rates.team,
        rates.rounds_per_call,
        rates.window,
        rates.windowed,
    )
