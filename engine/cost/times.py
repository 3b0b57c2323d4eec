"""Time of a sequence on its ring: compiled arithmetic that planner and simulator share.

A ring of degree D in one layer, where C is the compute of a round and X its transfers (schedule.py says which buffer is
sent when):

```
 forward   D - 1 rounds of hide(C, K,V), one of C
 backward  hide(C, K,V), D - 2 rounds of hide(C, K,V + dK,dV), hide(C, dK,dV), and the last hop of dK,dV
 hide(C, X) = max(C, X) + (1 - overlap) min(C, X)
```
All times are in nanoseconds for all layers together. Layers differ in the window of their attention: C has the pairs
of an average layer, spread evenly over the rounds, and X the K,V of all tokens, which make every hop in every layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import njit
from engine.cost import flops
from engine.cost.flops import WHOLE
from engine.units import Ints

# Tensors of the size of the queries that members of a team send each other: in a backward pass also the output and its
# gradient.
QUERIES_F, QUERIES_B = 1.0, 3.0
# Of a call of attention in a pipeline. With 8, plans of 2M tokens are no faster: calls wait longer for their K,V.
_ROUNDS_PER_CALL = 4

pairs_upto = njit(flops.pairs)


class Rates(NamedTuple):
    """Nanoseconds of one HDP rank, all layers together."""

    token_f: float  # of a token in linear layers, forward
    token_b: float  # of a token in linear layers, backward, with recomputation
    pair_f: float  # of a (query, key) pair in each layer, forward
    pair_b: float  # of a (query, key) pair in each layer, backward
    micro: float  # fixed, of a micro-batch, forward and backward
    sequence: float  # fixed, of a shard in a micro-batch, forward and backward
    # In each pass and for each call of attention with rings, but the causal one, which is a micro-batch's own:
    round: float  # fixed
    ring: float  # fixed, for each ring
    merge: float  # of merging block outputs, per token of a shard
    latency: float  # fixed, of a transfer, the same inside a node and between nodes
    kv: float  # to send a token's K,V to a rank of the same node
    dkv: float  # to send a token's dK,dV to a rank of the same node
    inter_node_slowdown: float  # factor on transfer times between nodes
    overlap: float  # fraction of the shorter of compute and transfer that the longer hides
    recompute_factor: float  # 1 if the backward pass runs the ring's forward pass again, else 0
    copy: float  # to copy all of a token's saved activations that may be offloaded, each way
    query: float = 0.0  # to send a token's queries to a rank of the same node, in the model's dtype
    result: float = 0.0  # to send a token's output, or the gradient of its queries, in the wider dtype
    team: int = 1  # largest team of a ring (planner/plan/schedule.py) that is tried
    rounds_per_call: int = 1  # at most, a power of two (planner/plan/schedule.py)
    window: float = float(WHOLE)  # most keys of a query in layers with a window, itself included
    windowed: float = 0.0  # fraction of the layers that have this window


def rounds_per_call(stages: int) -> int:
    """Return the maximum rounds of a call, a power of two, with this many pipeline stages."""
    return _ROUNDS_PER_CALL if stages > 1 else 1


@njit
def hide(rates: Rates, compute: float, transfer: float) -> float:
    """Time of a round with these times of compute and transfer, which partly overlap."""
    return max(compute, transfer) + (1.0 - rates.overlap) * min(compute, transfer)


@njit
def calls(rounds: float, most: int) -> float:
    """Return in how many calls of attention, of at most `most` rounds, so many rounds are computed (schedule.py).

    Part of a call counts as a part, so that times change smoothly with the degree of a ring.
    """
    count, size = 0.0, 1
    while size < most and rounds > size:
        count, rounds, size = count + 1.0, rounds - size, 2 * size
    return count + rounds / size


@njit
def forward_ring(rates: Rates, degree: float, first: float, compute: float, kv: float) -> float:
    """Forward time of a ring of 2 ranks or more; of any degree if all rounds are alike.

    `first` is the compute of the first round, `compute` that of a later one, and `kv` the time to send K,V on.
    """
    return hide(rates, first, kv) + (degree - 2) * hide(rates, compute, kv) + compute


@njit
def backward_ring(rates: Rates, degree: float, first: float, compute: float, kv: float, dkv: float) -> float:
    """Backward time of a ring, without recomputation of its forward pass. A lower bound if calls have several rounds.

    The arguments are as in `forward_ring`; `dkv` is the time to send dK,dV on.
    """
    if degree == 1:
        return first
    if rates.rounds_per_call > 1:  # which transfers run beside which rounds depends on the calls; none is faster
        return hide(rates, first + (degree - 1) * compute, (degree - 1) * (kv + dkv)) + dkv
    middle = (degree - 2) * hide(rates, compute, kv + dkv)
    return hide(rates, first, kv) + middle + hide(rates, compute, dkv) + dkv


@njit
def exchange(rates: Rates, tokens: float, team: int, slowdown: float, queries: float) -> float:
    """Time in which a rank of a team sends the queries of its shard of `tokens`, and gets their results, in one pass.

    `queries` is `QUERIES_F` or `QUERIES_B`.
    """
    return 2.0 * rates.latency + slowdown * (team - 1) * tokens * (queries * rates.query + rates.result)


@njit
def pairs(rates: Rates, tokens: float, before: float = 0.0) -> float:
    """(query, key) pairs of `tokens` tokens after `before` tokens of their sequence, on average over the layers."""
    found = tokens * (tokens + 1.0) / 2.0 + tokens * before
    # In layers with a window: the queries that have fewer keys, then those that have as many as the window.
    start, stop = min(before, rates.window), min(before + tokens, rates.window)
    within = (stop * (stop + 1.0) - start * (start + 1.0)) / 2.0 + (tokens - (stop - start)) * rates.window
    return found + rates.windowed * (within - found)


@njit
def token_forward(rates: Rates, tokens: float) -> float:
    """Forward time of a token of an unsplit sequence of `tokens`, in ns, on average."""
    return rates.token_f + rates.pair_f * (pairs(rates, tokens) / tokens)


@njit
def unsplit(rates: Rates, tokens: float) -> float:
    """Time of an unsplit sequence, in ns, both passes, without the fixed time of its micro-batch."""
    causal = pairs(rates, tokens)
    forward = rates.pair_f * causal
    attention = forward * (1.0 + rates.recompute_factor) + rates.pair_b * causal
    return (rates.token_f + rates.token_b) * tokens + attention + rates.sequence


@njit
def shared(rates: Rates, tokens: float, degree: int, slowdown: float) -> float:
    """Time of a sequence on a ring of `degree`, in ns, both passes, without the fixed time of its micro-batch.

    `slowdown` is 1 if the ring is inside a node, else `rates.inter_node_slowdown`.
    """
    if degree == 1:
        return unsplit(rates, tokens)
    causal = pairs(rates, tokens)
    best, team = together(rates, tokens, causal, 1, degree, slowdown), 2
    while team <= min(rates.team, degree):  # of any degree, so that times fall and rise smoothly with it
        best = min(best, together(rates, tokens, causal, 1, degree, slowdown, team))
        team *= 2
    return best


@njit
def in_team(rates: Rates, tokens: float, before: float, degree: int, slowdown: float) -> tuple[float, int]:
    """Return the time of a slice on a ring of 2 ranks or more, in the teams in which it is the shortest, and their
    size, which divides the degree.

    The slice has `tokens` tokens, and its sequence `before` tokens before it. The arguments are as in `shared`.
    """
    causal = pairs(rates, tokens, before)
    best, team, size = np.inf, 1, 1
    while size <= rates.team:
        if degree % size == 0:
            time = together(rates, tokens, causal, 1, degree, slowdown, size, before)
            if time < best:
                best, team = time, size
        size *= 2
    return best, team


@njit
def together(
    rates: Rates,
    tokens: float,
    causal: float,
    count: int,
    degree: int,
    slowdown: float,
    team: int = 1,
    before: float = 0.0,
) -> float:
    """Time of `count` sequences on rings of the same ranks, in ns, both passes, without that of their micro-batch.

    `tokens` and `causal`, their pairs, are sums over the sequences. The rings advance together, round by round, in
    teams of `team`. `before` are the tokens of earlier slices, whose K,V travel too. The first round is the causal call
    that every micro-batch has: it has no fixed times, except for the queries of mates or the keys of earlier slices,
    which need another call. A call of several rounds costs what its rounds do, but its fixed times only once.
    """
    turns = degree / team
    part, each = tokens / degree, causal / (degree * turns)  # of a rank; of one round
    carried = part + before / degree
    fixed = rates.round + rates.ring * count + rates.merge * part * team
    first = fixed if team > 1 or before > 0.0 else 0.0
    if rates.rounds_per_call > 1:  # a call's fixed times, on average over all rounds
        fixed = (first + fixed * (calls(turns, rates.rounds_per_call) - 1.0)) / turns
        first = fixed
    kv, dkv = rates.latency + slowdown * rates.kv * carried, rates.latency + slowdown * rates.dkv * carried
    forward = forward_ring(rates, turns, rates.pair_f * each + first, rates.pair_f * each + fixed, kv)
    backward = backward_ring(rates, turns, rates.pair_b * each + first, rates.pair_b * each + fixed, kv, dkv)
    if team > 1:
        forward += exchange(rates, part, team, slowdown, QUERIES_F)
        backward += exchange(rates, part, team, slowdown, QUERIES_B)
    linear = (rates.token_f + rates.token_b) * part
    return linear + forward * (1.0 + rates.recompute_factor) + backward + rates.sequence * count


@njit
def unsplit_times(rates: Rates, lengths: Ints) -> Ints:
    """`unsplit` of each length, rounded to whole nanoseconds, [S]."""
    times = np.empty(len(lengths), np.int64)
    for at in range(len(lengths)):
        times[at] = np.int64(unsplit(rates, float(lengths[at])) + 0.5)
    return times
