"""A lower bound of the time of a step of `static`, close to its simulated time and much cheaper to compute.

In each call of a ring the simulator waits for the slowest member. The bound follows the first and the last member of
each ring only, with the same formulas, and takes the larger of their times. These two have as many tokens as any other
member, give or take one per sequence, and between the last and the first one the ring leaves its node if it does so
anywhere. Packing, assignment to groups and order are those of the plan. So the bound is at most the simulated time, and
tests/planner/baselines/test_static_bound.py shows how close it is.
Letters: S sequences, M micro-batches, G groups of the mesh, D the degree of its rings, n stages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import njit
from engine.cost.budget import least_ratio
from engine.cost.times import Rates, hide
from engine.planner.baselines.static import Mesh, assigned
from engine.planner.plan.loads import mean_pairs
from engine.planner.plan.order import one_f_one_b
from engine.planner.plan.rows import grouped
from engine.planner.plan.schedule import call_start
from engine.planner.ratios import needs_offload
from engine.planner.settings import PlanSettings
from engine.planner.time.durations import with_gathers
from engine.units import PPM, Bools, Floats, Ints


class _Member(NamedTuple):
    """What one member of the ring of each micro-batch has, [M] each."""

    shards: Ints
    filled: Ints  # shards with at least one token
    tokens: Ints
    pairs: Floats  # (query, key) pairs, on average over the layers
    offload: Ints  # ppm
    slow: Floats  # how many times slower than full speed its rank is
    crosses: Bools  # whether its next hop leaves the node


_ROUNDING = 1e-9  # relative: the simulator adds the same numbers in another order


def static_bound(lengths: Ints, settings: PlanSettings) -> float:
    """Lower bound of the makespan of the static plan for a step of `lengths` [S], in ns."""
    mesh = assigned(lengths, settings)
    members = [_member(lengths, mesh, part, settings) for part in sorted({0, mesh.cp - 1})]
    passes = [_passes(settings.costs.rates, member, mesh.cp) for member in members]
    forward, backward = np.maximum.reduce(passes)

    # The place of each micro-batch among those of its group.
    start, micro_batches = grouped(mesh.group, settings.ranks // mesh.cp)
    count, place = np.diff(start), np.empty_like(mesh.group)
    place[micro_batches] = np.arange(len(place)) - start[:-1][mesh.group[micro_batches]]
    by_place = np.zeros((2, len(count), int(count.max())))  # forward and backward, [G, places]
    by_place[0, mesh.group, place], by_place[1, mesh.group, place] = forward, backward

    costs = settings.costs
    if settings.mode == "free":
        ends = by_place.sum(axis=(0, 2))
    elif settings.mode == "lockstep":
        slots = with_gathers(by_place.max(axis=1), costs)
        ends = slots.sum() + costs.slot * slots.shape[1]
    else:
        order = one_f_one_b(int(count.max()), settings.stages)
        ends = _pipelines(by_place, count, order, costs.shares)
    return float(ends.max()) * (1.0 - _ROUNDING)


def _member(lengths: Ints, mesh: Mesh, part: int, settings: PlanSettings) -> _Member:
    """Sum up the shards of member `part` of each micro-batch."""
    rates, taken = settings.costs.rates, lengths[mesh.sequences]
    shards, filled, tokens, buffers = _loads(taken, mesh.start, mesh.cp, part)
    pairs = _pairs(taken, mesh.start, mesh.cp, part, int(rates.window), rates.windowed)
    first = mesh.group * mesh.cp
    rank, home = first + part, settings.cluster.node_of
    crosses = home[rank] != home[first + (part + 1) % mesh.cp]
    offload = np.zeros_like(tokens)
    # Only what does not fit otherwise is offloaded (`fitted` in planner/ratios.py). In a pipeline that depends on what
    # else is in flight, so nothing is assumed.
    if settings.stages == 1 and needs_offload(settings):
        holds = settings.capacities[rank], settings.cluster.memory[rank]
        offload = np.minimum(least_ratio(settings.costs, tokens, buffers, *holds), settings.offload)
    return _Member(shards, filled, tokens, pairs, offload, 100.0 / settings.cluster.speed[rank], crosses)


@njit
def _loads(lengths: Ints, start: Ints, degree: int, part: int) -> Ints:
    """Return shards, filled shards, tokens and tokens of ring buffers of one member, [4, M].

    Micro-batch m has the sequences of lengths[start[m] : start[m + 1]].
    """
    loads = np.zeros((4, len(start) - 1), np.int64)
    for m in range(len(start) - 1):
        for length in lengths[start[m] : start[m + 1]]:
            size, longer = length // (2 * degree), length % (2 * degree)
            tokens = 2 * size + int(part < longer) + int(2 * degree - 1 - part < longer)
            loads[0, m] += 1
            loads[1, m] += tokens > 0
            loads[2, m] += tokens
            loads[3, m] += -(-length // degree) if degree > 1 else 0
    return loads


@njit
def _pairs(lengths: Ints, start: Ints, degree: int, part: int, window: int, windowed: float) -> Floats:
    """Return the (query, key) pairs of one member on average over the layers, [M] (`mean_pairs`)."""
    pairs = np.zeros(len(start) - 1)
    for m in range(len(start) - 1):
        for length in lengths[start[m] : start[m + 1]]:
            pairs[m] += mean_pairs(length, 0, degree, part, window, windowed)
    return pairs


@njit
def _passes(rates: Rates, member: _Member, degree: int) -> Floats:
    """Return the forward and the backward time of each micro-batch for one of its members, [2, M].

    As `_gangs` of planner/time/durations.py would if the gang had no other members.
    """
    times = np.zeros((2, len(member.tokens)))
    for m in range(len(member.tokens)):
        tokens, pairs, slow = float(member.tokens[m]), float(member.pairs[m]), member.slow[m]
        f = (rates.micro / 3.0 + rates.token_f * tokens + rates.sequence / 3.0 * member.shards[m]) * slow
        b = (rates.micro * 2.0 / 3.0 + rates.token_b * tokens + rates.sequence * 2.0 / 3.0 * member.shards[m]) * slow
        if degree == 1:
            f += rates.pair_f * pairs * slow
            b += (rates.pair_b + rates.recompute_factor * rates.pair_f) * pairs * slow
        elif member.filled[m] > 0:
            merged = rates.ring * member.filled[m] + rates.merge * tokens
            slowdown = rates.inter_node_slowdown if member.crosses[m] else 1.0
            kv, dkv = slowdown * rates.kv * tokens, slowdown * rates.dkv * tokens
            ring_f = _ring(rates, degree, rates.pair_f * pairs, merged, slow, kv, 0.0)
            ring_b = _ring(rates, degree, rates.pair_b * pairs, merged, slow, kv, dkv)
            f, b = f + ring_f, b + ring_b + rates.recompute_factor * ring_f
        copied = rates.copy * member.offload[m] / PPM * tokens
        times[0, m], times[1, m] = max(f, copied), max(b, copied)
    return times


@njit
def _ring(rates: Rates, degree: int, attention: float, merged: float, slow: float, kv: float, dkv: float) -> float:
    """Return the time of one pass of a ring for one member, call by call (`_call` of planner/time/durations.py).

    `attention` is the time of all rounds, `merged` that of each call after the first, `kv` and `dkv` that of a hop;
    `dkv` is 0 in a forward pass.
    """
    most, total, call = rates.rounds_per_call, 0.0, 0
    before = start = 0
    while before < degree:
        stop, after = call_start(call + 1, most), call_start(call + 2, most)
        work = 0.0
        if start < degree:
            work = attention / degree * (min(stop, degree) - start) + (merged + rates.round if call > 0 else 0.0)
        hops = max(0, min(after, degree) - stop)
        back = max(0, min(start, degree) - before) if dkv > 0.0 else 0
        total += hide(rates, work * slow, hops * kv + back * dkv + rates.latency * (hops + back))
        before, start, call = start, stop, call + 1
    return total


@njit
def _pipelines(times: Floats, count: Ints, passes: Ints, shares: Floats) -> Floats:
    """Return when the pipelines of each group end, [G], if they run `passes` (planner/plan/order.py).

    `times` [2, G, places] are the forward and backward times of the micro-batches of all stages together, of which
    group g has count[g]; shares [n] are the parts of the stages.
    """
    stages, ends = len(shares), np.zeros(len(count))
    for g in range(len(count)):
        ended, moved = np.zeros(stages), np.zeros(stages)  # the latest pass and transfer of each device
        arrived = np.zeros((count[g], stages))  # when the input of the next pass of a micro-batch is there
        for number in passes:
            place, stage, backward = number // (2 * stages), number // 2 % stages, number % 2
            if place >= count[g]:
                continue
            end = max(ended[stage], arrived[place, stage]) + times[backward, g, place] * shares[stage]
            ended[stage] = end
            target = stage - 1 if backward else stage + 1
            if 0 <= target < stages:
                moved[stage] = moved[target] = max(end, ended[target], moved[stage], moved[target])
                arrived[place, target] = moved[stage]
        ends[g] = ended.max()
    return ends
