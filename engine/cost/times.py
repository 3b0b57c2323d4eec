"""Seconds of a shard on its ring: plain arithmetic, compiled, so that planner and simulator count alike.

A ring of D in one layer, C the compute of a round and X its transfers (schedule.py says which travel when):

```
 forward   D - 1 rounds of hide(C, K,V), one of C
 backward  hide(C, K,V), D - 2 rounds of hide(C, K,V + dK,dV), hide(C, dK,dV), and the way home: dK,dV
 hide(C, X) = max(C, X) + (1 - overlap) min(C, X)
```
All times are in nanoseconds, of all layers together: layers are alike, so a sum over them is a factor.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import kernel


class Rates(NamedTuple):
    """Nanoseconds, all layers together, of one HDP rank."""

    token_f: float  # a token, forward: linear layers
    token_b: float  # and backward, recomputation included
    pair_f: float  # a (query, key) pair, forward
    pair_b: float
    micro: float  # a micro-batch, forward and backward, however small
    sequence: float  # a shard of a micro-batch, forward and backward
    round: float  # a round of a ring, each pass
    merge: float  # a token of a shard in a round, each pass
    latency: float  # a transfer of a round, however small, inside a node and between nodes alike
    kv: float  # a token's K,V to a rank of the same node
    dkv: float  # a token's dK,dV
    far: float  # how many times slower a byte travels between nodes
    overlap: float  # share of the shorter of compute and transfer that hides
    again: float  # 1 if the backward pass runs the ring's forward pass once more, else 0
    copy: float  # what of a token's saved activations may go to the host, and as much for the way back


@kernel
def hide(rates: Rates, compute: float, transfer: float) -> float:
    """Return the time of a round."""
    return max(compute, transfer) + (1.0 - rates.overlap) * min(compute, transfer)


@kernel
def forward_ring(rates: Rates, degree: int, compute: float, kv: float) -> float:
    """Return the forward time of a ring's rounds: `compute` and `kv` are those of one round."""
    return (degree - 1) * hide(rates, compute, kv) + compute


@kernel
def backward_ring(rates: Rates, degree: int, compute: float, kv: float, dkv: float) -> float:
    """Return the backward time of a ring's rounds, degree 2 or more, the forward one run again left out."""
    middle = (degree - 2) * hide(rates, compute, kv + dkv)
    return hide(rates, compute, kv) + middle + hide(rates, compute, dkv) + dkv


@kernel
def whole(rates: Rates, tokens: float) -> float:
    """Return the time of an uncut sequence, the micro-batch's own left out."""
    pairs = tokens * (tokens + 1.0) / 2.0
    forward = rates.pair_f * pairs
    attention = forward * (1.0 + rates.again) + rates.pair_b * pairs
    return (rates.token_f + rates.token_b) * tokens + attention + rates.sequence


@kernel
def shared(rates: Rates, tokens: float, degree: int, far: float) -> float:
    """Return the time of a sequence on a ring of `degree`; `far` is 1 inside a node, `rates.far` between nodes."""
    if degree == 1:
        return whole(rates, tokens)
    part = tokens / degree
    pairs = tokens * (tokens + 1.0) / (2.0 * degree * degree)  # of one round
    fixed = rates.round + rates.merge * part
    kv, dkv = rates.latency + far * rates.kv * part, rates.latency + far * rates.dkv * part
    forward = forward_ring(rates, degree, rates.pair_f * pairs + fixed, kv)
    backward = backward_ring(rates, degree, rates.pair_b * pairs + fixed, kv, dkv)
    linear = (rates.token_f + rates.token_b) * part
    return linear + forward * (1.0 + rates.again) + backward + rates.sequence


@kernel
def wholes(rates: Rates, lengths: np.ndarray) -> np.ndarray:
    """Return the times of uncut sequences, rounded to whole nanoseconds."""
    times = np.empty(len(lengths), np.int64)
    for at in range(len(lengths)):
        times[at] = np.int64(whole(rates, float(lengths[at])) + 0.5)
    return times
