"""How long each gang takes: its layers' linear parts, then its rings round by round, each pass.

All rings of a gang advance together. In a round each member computes its blocks and sends its buffers; a round ends
when the slowest member, or the busiest node's network cards, are done. Rounds in which the same rings take part in the
same way are counted once and multiplied. Letters: G gangs, M micro-batches, K shards (planner/plan.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.cluster.cluster import Cluster
from engine.compiled import kernel
from engine.cost.model import PPM, Costs
from engine.cost.times import Rates, hide
from engine.planner import loads
from engine.planner.plan import Ints, StepPlan
from engine.planner.rows import grouped

Floats = NDArray[np.float64]


class Gangs(NamedTuple):
    """Nanoseconds. `exposed` is the part of a gang's two passes in which rounds wait for transfers alone."""

    forward: Floats  # [G]
    backward: Floats  # [G]
    exposed: Floats  # [G]
    compute: Floats  # [M] what a micro-batch computes itself


class _Pass(NamedTuple):
    """What differs between a ring's forward and its backward pass. Values, not flags, so that it is compiled once."""

    pair: float  # ns of a (query, key) pair
    dkv: float  # ns of a token's dK,dV to the next rank: 0 forward
    runs: float  # how often the pass runs


class _Rows(NamedTuple):
    """The plan and the cluster as the kernels read them."""

    member_start: Ints  # [G + 1]
    members: Ints  # [M] micro-batches, gang by gang
    shard_start: Ints  # [M + 1]
    shard_order: Ints  # [K]
    degree: Ints  # [K]
    tokens: Ints  # [K]
    pairs: Ints  # [K]
    cross: Ints  # [K] 1 if the shard's hop leaves the node
    node: Ints  # [M]
    slow: Floats  # [M] how many times slower than full speed the rank is
    offload: Ints  # [M] parts per million


def gang_times(plan: StepPlan, costs: Costs, cluster: Cluster) -> Gangs:
    """Return how long the gangs of a verified plan take on a cluster."""
    rows = _rows(plan, cluster)
    linear_f, linear_b = _linear(costs.rates, rows)
    return Gangs(*_gangs(costs.rates, costs.nics, rows, linear_f, linear_b, len(cluster.nodes)))


def by_slot(plan: StepPlan, gangs: Gangs) -> tuple[Floats, Floats]:
    """Return how long the two passes of each lockstep slot take: as long as the longest gang's."""
    slots = int(plan.slot.max()) + 1
    forward, backward = np.zeros(slots), np.zeros(slots)
    np.maximum.at(forward, plan.slot, gangs.forward[plan.gang])
    np.maximum.at(backward, plan.slot, gangs.backward[plan.gang])
    return forward, backward


def crossing(plan: StepPlan, cluster: Cluster) -> Ints:
    """Return for each shard 1 if the hop to the next part of its ring leaves the node, else 0, [K]."""
    node = cluster.node_of[plan.ring_ranks]
    return (node != node[loads.next_shards(plan)]).astype(np.int64)


def _rows(plan: StepPlan, cluster: Cluster) -> _Rows:
    member_start, members = grouped(plan.gang, int(plan.gang.max()) + 1)
    tokens, pairs = loads.shard_loads(plan)
    return _Rows(
        member_start=member_start,
        members=members,
        shard_start=plan.shard_start,
        shard_order=plan.shard_order,
        degree=plan.degrees[plan.shard_sequence],
        tokens=tokens,
        pairs=pairs,
        cross=crossing(plan, cluster),
        node=cluster.node_of[plan.micro_rank],
        slow=100.0 / cluster.speed[plan.micro_rank],
        offload=plan.offload,
    )


@kernel
def _linear(rates: Rates, rows: _Rows) -> tuple[Floats, Floats]:
    """Return each micro-batch's forward and backward time beside its rings' rounds, [M]: whole sequences included."""
    forward = np.zeros(len(rows.node))
    backward = np.zeros(len(rows.node))
    for m in range(len(rows.node)):
        if rows.shard_start[m] == rows.shard_start[m + 1]:
            continue
        f, b = rates.micro / 3.0, rates.micro * 2.0 / 3.0
        for place in range(rows.shard_start[m], rows.shard_start[m + 1]):
            k = rows.shard_order[place]
            f += rates.token_f * rows.tokens[k] + rates.sequence / 3.0
            b += rates.token_b * rows.tokens[k] + rates.sequence * 2.0 / 3.0
            if rows.degree[k] == 1:
                f += rates.pair_f * rows.pairs[k]
                b += (rates.pair_b + rates.again * rates.pair_f) * rows.pairs[k]
        forward[m], backward[m] = f * rows.slow[m], b * rows.slow[m]
    return forward, backward


@kernel
def _gangs(
    rates: Rates, nics: float, rows: _Rows, linear_f: Floats, linear_b: Floats, nodes: int
) -> tuple[Floats, Floats, Floats, Floats]:
    gangs = len(rows.member_start) - 1
    forward, backward, exposed = np.zeros(gangs), np.zeros(gangs), np.zeros(gangs)
    compute = linear_f + linear_b
    leaving = np.zeros(nodes)
    ahead, back = _Pass(rates.pair_f, 0.0, 1.0 + rates.again), _Pass(rates.pair_b, rates.dkv, 1.0)
    for g in range(gangs):
        members = rows.members[rows.member_start[g] : rows.member_start[g + 1]]
        f, b = 0.0, 0.0
        for m in members:
            f, b = max(f, linear_f[m]), max(b, linear_b[m])
        if len(members) > 1:
            ring_f, waits_f = _rounds(rates, nics, rows, members, ahead, compute, leaving)
            ring_b, waits_b = _rounds(rates, nics, rows, members, back, compute, leaving)
            f, b = f + ring_f, b + ring_b + rates.again * ring_f
            exposed[g] = waits_f * (1.0 + rates.again) + waits_b
        for m in members:
            if rows.offload[m] > 0:
                copied = rates.copy * rows.offload[m] / PPM * _tokens(rows, m)
                f, b = max(f, copied), max(b, copied)
        forward[g], backward[g] = f, b
    return forward, backward, exposed, compute


@kernel
def _tokens(rows: _Rows, m: int) -> int:
    tokens = 0
    for place in range(rows.shard_start[m], rows.shard_start[m + 1]):
        tokens += rows.tokens[rows.shard_order[place]]
    return tokens


@kernel
def _rounds(
    rates: Rates, nics: float, rows: _Rows, members: Ints, way: _Pass, compute: Floats, leaving: Floats
) -> tuple[float, float]:
    """Return the time of a gang's rounds in one pass, and how much of it waits for transfers; adds to `compute` [M]."""
    total, waits = 0.0, 0.0
    changes = _changes(rows, members)
    for round_ in range(len(changes) - 1):
        if changes[round_]:
            alike = _until(changes, round_ + 1) - round_
            longest, busiest = _round(rates, nics, rows, members, way, round_, alike, compute, leaving)
            total += longest * alike
            waits += (longest - busiest) * alike
    return total, waits


@kernel
def _changes(rows: _Rows, members: Ints) -> NDArray[np.bool_]:
    """Return True for rounds in which a ring does something else: 0, 1, its last two, the one after; and the end."""
    largest = 1
    for m in members:
        for place in range(rows.shard_start[m], rows.shard_start[m + 1]):
            largest = max(largest, rows.degree[rows.shard_order[place]])
    changes = np.zeros(largest + 2, np.bool_)
    changes[0] = changes[1] = changes[largest + 1] = True
    for m in members:
        for place in range(rows.shard_start[m], rows.shard_start[m + 1]):
            degree = rows.degree[rows.shard_order[place]]
            if degree > 1:
                changes[degree - 1] = changes[degree] = changes[degree + 1] = True
    return changes


@kernel
def _until(changes: NDArray[np.bool_], round_: int) -> int:
    """Return the first change from `round_` on."""
    while not changes[round_]:
        round_ += 1
    return round_


@kernel
def _round(
    rates: Rates,
    nics: float,
    rows: _Rows,
    members: Ints,
    way: _Pass,
    round_: int,
    rounds: int,
    compute: Floats,
    leaving: Floats,
) -> tuple[float, float]:
    """Return the time of one round and its longest compute; `compute` [M] grows by all `rounds`, rerun ones too."""
    for m in members:
        leaving[rows.node[m]] = 0.0
    for m in members:
        for place in range(rows.shard_start[m], rows.shard_start[m + 1]):
            k = rows.shard_order[place]
            if rows.cross[k]:
                sent, _ = _sent(rates, rows.degree[k], rows.tokens[k], way, round_)
                leaving[rows.node[m]] += rates.far * sent / nics
    longest, busiest = 0.0, 0.0
    for m in members:
        work, transfer, delay = 0.0, 0.0, 0.0
        for place in range(rows.shard_start[m], rows.shard_start[m + 1]):
            k = rows.shard_order[place]
            degree = rows.degree[k]
            if degree == 1:
                continue
            if round_ < degree:
                work += way.pair * rows.pairs[k] / degree + rates.merge * rows.tokens[k]
            sent, messages = _sent(rates, degree, rows.tokens[k], way, round_)
            transfer += rates.far * sent if rows.cross[k] else sent
            delay = max(delay, rates.latency * messages)
        if work > 0.0:
            work = (work + rates.round) * rows.slow[m]
        compute[m] += work * rounds * way.runs
        busiest = max(busiest, work)
        longest = max(longest, hide(rates, work, max(transfer, leaving[rows.node[m]]) + delay))
    return longest, busiest


@kernel
def _sent(rates: Rates, degree: int, tokens: int, way: _Pass, round_: int) -> tuple[float, float]:
    """Return the time that a shard's transfers of a round take inside a node, latency left out, and how many they are.

    They are those of schedule.transfers.
    """
    sent, messages = 0.0, 0.0
    if tokens > 0 and round_ < degree - 1:
        sent, messages = rates.kv * tokens, 1.0
    if tokens > 0 and way.dkv > 0.0 and degree > 1 and 1 <= round_ <= degree:
        sent, messages = sent + way.dkv * tokens, messages + 1.0
    return sent, messages
