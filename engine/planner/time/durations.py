"""Durations of gangs: the linear layers and unsplit sequences of the members, then the rings, call by call.

All rings of a gang advance together. During a call, each member computes the blocks of its rounds and sends its buffers
(plan/schedule.py); the call ends when the slowest member, or the busiest node's network cards, are done. Equal calls
are computed once and multiplied.
Letters: G gangs, M micro-batches, K shards (step_plan.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.cluster.cluster import Cluster
from engine.compiled import njit
from engine.cost.model import Costs
from engine.cost.times import QUERIES_B, QUERIES_F, Rates, exchange, hide
from engine.planner.plan import loads
from engine.planner.plan.rows import grouped
from engine.planner.plan.schedule import call_of_round, call_start
from engine.planner.plan.step_plan import StepPlan
from engine.units import PPM, Floats, Ints


class Gangs(NamedTuple):
    """Durations in ns."""

    forward: Floats  # [G]
    backward: Floats  # [G]
    exposed: Floats  # [G] time of both passes in which calls only wait for transfers
    compute: Floats  # [M] time in which the rank of the micro-batch computes


class _Pass(NamedTuple):
    """What differs between the forward and the backward pass of rings.

    Numbers instead of a flag for the direction, so that numba compiles only one version of the code.
    """

    pair: float  # ns per (query, key) pair
    dkv: float  # ns per token to send dK,dV to the next rank; 0 in the forward pass
    runs: float  # how many times the pass runs
    queries: float  # tensors of the size of the queries that members of a team send each other


class _Rounds(NamedTuple):
    """First rounds of four consecutive calls: the one before a call, the call itself, and the two after it."""

    before: int
    start: int
    stop: int
    after: int


class _Rows(NamedTuple):
    """The plan and the cluster as arrays for @njit functions."""

    member_start: Ints  # [G + 1]
    members: Ints  # [M] micro-batches, gang by gang
    shard_start: Ints  # [M + 1]
    shard_order: Ints  # [K]
    degree: Ints  # [K]
    team: Ints  # [K]
    tokens: Ints  # [K]
    carried: Ints  # [K] tokens whose K,V the shard's part brings to the ring
    pairs: Floats  # [K] on average over the layers
    cross: Ints  # [K] 1 if the shard's hop leaves the node
    node: Ints  # [M]
    slow: Floats  # [M] how many times slower than full speed the rank is
    offload: Ints  # [M] ppm


def gang_times(plan: StepPlan, costs: Costs, cluster: Cluster) -> Gangs:
    """Compute the durations of the gangs of a verified plan on a cluster."""
    member_start, members = grouped(plan.gang, plan.gangs)
    rows = _Rows(
        member_start=member_start,
        members=members,
        shard_start=plan.shard_start,
        shard_order=plan.shard_order,
        degree=plan.degrees[plan.shard_slice],
        team=plan.team[plan.shard_slice],
        tokens=loads.shard_tokens(plan),
        carried=loads.carried_tokens(plan),
        pairs=loads.shard_pairs(plan, costs.rates),
        cross=crossing(plan, cluster),
        node=cluster.node_of[plan.micro_rank],
        slow=100.0 / cluster.speed[plan.micro_rank],
        offload=plan.offload,
    )
    return Gangs(*_gangs(costs.rates, costs.nics, rows, len(cluster.nodes)))


def by_slot(plan: StepPlan, gangs: Gangs, costs: Costs) -> tuple[Floats, Floats]:
    """Return the forward and backward times of each lockstep slot, [slots] each, without `costs.slot`.

    Each is the maximum over the slot's gangs, and over the collectives that travel beside it (`Costs.gathers`).
    """
    slots = int(plan.slot.max()) + 1
    forward, backward = np.zeros(slots), np.zeros(slots)
    np.maximum.at(forward, plan.slot, gangs.forward[plan.gang])
    np.maximum.at(backward, plan.slot, gangs.backward[plan.gang])
    both = with_gathers(np.stack([forward, backward]), costs)
    return both[0], both[1]


def with_gathers(times: Floats, costs: Costs) -> Floats:
    """Add `Costs.gathers`, as far as they do not hide, to the forward and backward times of slots, [2, slots]."""
    gathers = np.array(costs.gathers, dtype=np.float64)[:, None]
    found: Floats = np.maximum(times, gathers) + (1.0 - costs.rates.overlap) * np.minimum(times, gathers)
    return found


def crossing(plan: StepPlan, cluster: Cluster) -> Ints:
    """Return 1 for each shard whose K,V leave the node in their next hop, or whose team has ranks on other nodes, else
    0, [K]."""
    node = cluster.node_of[plan.ring_ranks]
    leaves = node != node[plan.next_shard]
    for turn in range(1, int(plan.team.max())):
        leaves |= node != node[plan.mates(turn)]
    return leaves.astype(np.int64)


@njit
def _gangs(rates: Rates, nics: float, rows: _Rows, nodes: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Compiled part of `gang_times`: returns the fields of `Gangs`. `nics` is the number of network cards of a node."""
    gangs = len(rows.member_start) - 1
    forward, backward, exposed = np.zeros(gangs), np.zeros(gangs), np.zeros(gangs)
    linear_f, linear_b, tokens = _linear(rates, rows)
    compute = linear_f + linear_b
    leaving = np.zeros(nodes)
    forward_pass = _Pass(rates.pair_f, 0.0, 1.0 + rates.recompute_factor, QUERIES_F)
    backward_pass = _Pass(rates.pair_b, rates.dkv, 1.0, QUERIES_B)
    for g in range(gangs):
        members = rows.members[rows.member_start[g] : rows.member_start[g + 1]]
        # Linear layers and unsplit sequences come first. The rings begin when the slowest member has finished them.
        f, b = 0.0, 0.0
        for m in members:
            f, b = max(f, linear_f[m]), max(b, linear_b[m])
        if len(members) > 1:
            ring_f, waits_f = _rounds(rates, nics, rows, members, forward_pass, compute, leaving)
            ring_b, waits_b = _rounds(rates, nics, rows, members, backward_pass, compute, leaving)
            # With `recompute` layer, the backward pass runs the rings' forward pass again.
            f, b = f + ring_f, b + ring_b + rates.recompute_factor * ring_f
            exposed[g] = waits_f * (1.0 + rates.recompute_factor) + waits_b
        # Copies to and from the host overlap with compute, so a pass takes at least as long as they do.
        for m in members:
            if rows.offload[m] > 0:
                copied = rates.copy * rows.offload[m] / PPM * tokens[m]
                f, b = max(f, copied), max(b, copied)
        forward[g], backward[g] = f, b
    return forward, backward, exposed, compute


@njit
def _linear(rates: Rates, rows: _Rows) -> tuple[Floats, Floats, Ints]:
    """Return each micro-batch's forward and backward time without its rings' rounds, and its tokens, all [M]."""
    forward, backward = np.zeros(len(rows.node)), np.zeros(len(rows.node))
    tokens = np.zeros(len(rows.node), np.int64)
    for m in range(len(rows.node)):
        if rows.shard_start[m] == rows.shard_start[m + 1]:
            continue
        f, b = rates.micro / 3.0, rates.micro * 2.0 / 3.0
        for place in range(rows.shard_start[m], rows.shard_start[m + 1]):
            k = rows.shard_order[place]
            tokens[m] += rows.tokens[k]
            f += rates.token_f * rows.tokens[k] + rates.sequence / 3.0
            b += rates.token_b * rows.tokens[k] + rates.sequence * 2.0 / 3.0
            # The pairs of rings are computed in their rounds (`_call`).
            if rows.degree[k] == 1:
                f += rates.pair_f * rows.pairs[k]
                b += (rates.pair_b + rates.recompute_factor * rates.pair_f) * rows.pairs[k]
        forward[m], backward[m] = f * rows.slow[m], b * rows.slow[m]
    return forward, backward, tokens


@njit
def _rounds(
    rates: Rates, nics: float, rows: _Rows, members: Ints, pass_: _Pass, compute: Floats, leaving: Floats
) -> tuple[float, float]:
    """Return the time of a gang's rounds in one pass, and the part of it that only waits for transfers.

    Adds the compute of the rounds to `compute` [M]. `members` are the gang's micro-batches; `leaving`: see `_call`.
    """
    largest = 1
    for m in members:
        for place in range(rows.shard_start[m], rows.shard_start[m + 1]):
            k = rows.shard_order[place]
            largest = max(largest, rows.degree[k] // rows.team[k])
    # Calls differ until they have the most rounds. A ring does something new in the call of its last round, in the one
    # before, whose transfers are for that call, and in the two after, in which its last dK,dV return.
    last = call_of_round(largest - 1, rates.rounds_per_call) + 1
    changes = np.zeros(last + 3, np.bool_)
    changes[: call_of_round(rates.rounds_per_call - 1, rates.rounds_per_call) + 3] = True
    changes[last + 1] = True
    for m in members:
        for place in range(rows.shard_start[m], rows.shard_start[m + 1]):
            turns = rows.degree[rows.shard_order[place]] // rows.team[rows.shard_order[place]]
            if turns > 1:
                at = call_of_round(turns - 1, rates.rounds_per_call)
                changes[max(0, at - 1) : at + 3] = True
    total = waits = _exchanges(rates, rows, members, pass_)
    call = 0
    while call <= last:
        equal = 1
        while not changes[call + equal]:
            equal += 1
        longest, busiest = _call(rates, nics, rows, members, pass_, call, equal, compute, leaving)
        total += longest * equal
        waits += (longest - busiest) * equal
        call += equal
    return total, waits


@njit
def _call(
    rates: Rates,
    nics: float,
    rows: _Rows,
    members: Ints,
    pass_: _Pass,
    call: int,
    calls: int,
    compute: Floats,
    leaving: Floats,
) -> tuple[float, float]:
    """Return the time of one call and its longest compute. Adds to `compute` [M] for all `calls` equal calls.

    Meanwhile the K,V of the next call's rounds arrive, and the dK,dV of the call before move on. `leaving` [nodes] is
    scratch space: the time that each node's network cards take for the data that leaves the node.
    """
    most = rates.rounds_per_call
    before = call_start(call - 1, most) if call > 0 else 0
    rounds = _Rounds(before, call_start(call, most), call_start(call + 1, most), call_start(call + 2, most))
    # All hops of the gang that leave a node share its network cards.
    for m in members:
        leaving[rows.node[m]] = 0.0
    for m in members:
        for place in range(rows.shard_start[m], rows.shard_start[m + 1]):
            k = rows.shard_order[place]
            if rows.cross[k]:
                sent, _ = _sent(rates, rows.degree[k] // rows.team[k], rows.carried[k], pass_, rounds)
                leaving[rows.node[m]] += rates.inter_node_slowdown * sent / nics
    # The members run at the same time, so the slowest one decides.
    longest, busiest = 0.0, 0.0
    for m in members:
        work, transfer, delay, fixed = 0.0, 0.0, 0.0, rates.round if call > 0 else 0.0
        for place in range(rows.shard_start[m], rows.shard_start[m + 1]):
            k = rows.shard_order[place]
            degree = rows.degree[k]
            if degree == 1:
                continue
            team = rows.team[k]
            turns = degree // team
            own = min(rounds.stop, turns) - rounds.start
            if own > 0 and rows.tokens[k] > 0:
                work += pass_.pair * rows.pairs[k] / turns * own
                if call > 0 or team > 1 or rows.carried[k] > rows.tokens[k]:  # not the causal call (`together`)
                    work += rates.merge * rows.tokens[k] * team + rates.ring
                    fixed = rates.round
            sent, messages = _sent(rates, turns, rows.carried[k], pass_, rounds)
            transfer += rates.inter_node_slowdown * sent if rows.cross[k] else sent
            delay = max(delay, rates.latency * messages)
        if work > 0.0:
            work = (work + fixed) * rows.slow[m]
        compute[m] += work * calls * pass_.runs
        # Transfers take as long as the slower of the member's own hops and of its node's network cards.
        busiest = max(busiest, work)
        longest = max(longest, hide(rates, work, max(transfer, leaving[rows.node[m]]) + delay))
    return longest, busiest


@njit
def _exchanges(rates: Rates, rows: _Rows, members: Ints, pass_: _Pass) -> float:
    """Return the time in which the teams of a gang exchange queries and results, before and after the rounds."""
    longest = 0.0
    for m in members:
        time = 0.0
        for place in range(rows.shard_start[m], rows.shard_start[m + 1]):
            k = rows.shard_order[place]
            if rows.team[k] > 1:
                slowdown = rates.inter_node_slowdown if rows.cross[k] else 1.0
                time += exchange(rates, float(rows.tokens[k]), rows.team[k], slowdown, pass_.queries)
        longest = max(longest, time)
    return longest


@njit
def _sent(rates: Rates, turns: int, tokens: int, pass_: _Pass, rounds: _Rounds) -> tuple[float, float]:
    """Return the time of a shard's transfers during a call, without latency and as if inside a node, and their number.

    The transfers are those of schedule.transfers.
    """
    if tokens == 0 or turns == 1:
        return 0.0, 0.0
    kv = max(0, min(rounds.after, turns) - rounds.stop)
    dkv = max(0, min(rounds.start, turns) - rounds.before) if pass_.dkv > 0.0 else 0
    return (kv * rates.kv + dkv * pass_.dkv) * tokens, float(kv + dkv)
