"""Tokens and attention work of the shards and micro-batches of a plan, and the peers of its ranks.

The arrays of the plan must be well-formed (rule 0 of `verify`).
Letters: S slices, P ranks, K shards, M micro-batches (step_plan.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.compiled import njit
from engine.cost.flops import WHOLE
from engine.cost.model import Costs
from engine.cost.times import Rates, pairs_upto, rounds_per_call
from engine.planner.plan.schedule import call_of_round, call_start, chunk_start
from engine.planner.plan.step_plan import RankPlan, StepPlan
from engine.units import Floats, Ints


def shard_tokens(plan: StepPlan) -> Ints:
    """Return the tokens of each shard, [K]."""
    return _shard_tokens(plan.lengths, plan.ring_start)


def shard_pairs(plan: StepPlan, rates: Rates) -> Floats:
    """Return the (query, key) pairs of each shard on average over the layers, [K]."""
    return _shard_pairs(plan.lengths, plan.before, plan.ring_start, int(rates.window), rates.windowed)


def carried_tokens(plan: StepPlan) -> Ints:
    """Return the tokens whose K,V each part brings to its ring, [K]: those of its shard, and of its prefix."""
    tokens = shard_tokens(plan)
    return tokens if plan.sequences == plan.slices else _carried(tokens, plan.before, plan.ring_start)


def unsplit_share(plan: RankPlan) -> float:
    """Return the share of the tokens of the step that are in sequences on one rank."""
    return plan.unsplit_tokens / plan.tokens


def micro_tokens(plan: StepPlan) -> Ints:
    """Return the tokens of each micro-batch, [M]."""
    return micro_loads(plan)[0]


def micro_loads(plan: StepPlan) -> tuple[Ints, Ints]:
    """Return the tokens of each micro-batch, [M], and the tokens that its ring buffers hold, [M].

    A ring's buffers must fit the shard of any member, and its prefix, so each ring adds the tokens of its largest. A
    ring in teams of c adds them c times: in a layer, the blocks of each member have copies of these keys and their
    gradients. A ring whose calls have fewer rounds than a call may have adds a part.
    """
    plan_arrays = (plan.lengths, plan.before, plan.team, plan.ring_start, plan.shard_micro)
    return _micro_loads(*plan_arrays, plan.micro_batches, rounds_per_call(plan.stages))


def near(plan: StepPlan) -> Ints:
    """Return the ranks that each shard is sent to or received from, [K, N]."""
    largest = int(plan.team.max())
    hops = [plan.next_shard] + [plan.mates(turn) for turn in range(1, largest)]
    if largest > 1:  # expert counts go to the next part
        hops.append(plan.hops(np.ones_like(plan.team)))
    return _near(np.stack(hops), plan.ring_ranks)


def peers(plan: StepPlan) -> Ints:
    """Return the number of distinct ranks that each rank sends to or receives from, [P]."""
    return _peers(plan.micro_start, plan.shard_start, plan.shard_order, near(plan))


class InFlight(NamedTuple):
    """What each stage of a pipeline holds when the backward pass of a micro-batch begins, besides its activations."""

    tokens: Ints  # [n, M] tokens of other micro-batches whose activations are on the device, and what counts as such
    offloading: Ints  # [n, M] how many other micro-batches have activations on the host


def in_flight(plan: StepPlan, costs: Costs) -> InFlight:
    """Return the micro-batches in flight on each stage of a pipeline.

    Counted as tokens are also the K,V that each slice keeps for later ones until its own backward pass
    (`Costs.slice_kv_bytes`), and their gradients (`gradient_tokens`): those of all micro-batches, this one included.
    The micro-batches of a stage fill its memory the most when one of these passes begins, because only backward passes
    free memory, and the gradients that a pass makes are counted from its start.
    """
    saved = np.stack([stage.resident_here(micro_tokens(plan), plan.offload) for stage in costs.stages])
    held = (held_tokens(plan, costs), *gradient_tokens(plan, costs), saved)
    return InFlight(*_in_flight(*held, plan.offload, plan.micro_start, plan.passes))


def held_tokens(plan: StepPlan, costs: Costs) -> Ints:
    """Return the tokens that each micro-batch holds on each stage from its forward to its backward pass, [n, M].

    What a team needs while a layer attends counts too.
    """
    tokens, mates = micro_tokens(plan), np.zeros(plan.micro_batches, dtype=np.int64)
    kv_of = _of_micro_batches(plan, _continued_tokens(plan))
    if int(plan.team.max()) > 1:
        mates = _of_micro_batches(plan, shard_tokens(plan) * (plan.team[plan.shard_slice] - 1))
    held = np.empty((len(costs.stages), plan.micro_batches), dtype=np.int64)
    for number, stage in enumerate(costs.stages):
        besides = _as_tokens(kv_of * stage.slice_kv_bytes + mates * stage.team_bytes, stage)
        held[number] = stage.resident_here(tokens, plan.offload) + besides
    return held


def gradient_tokens(plan: StepPlan, costs: Costs) -> tuple[Ints, Ints]:
    """Return the gradients of slices' K,V, counted as tokens: what a backward pass adds, and removes, [n, M] each.

    The backward pass of a sequence's last slice adds those of all its earlier slices, and each removes its own.
    """
    own = _continued_tokens(plan)
    ends = (plan.sliced & ~plan.continued)[plan.shard_slice]
    added, removed = np.empty((2, len(costs.stages), plan.micro_batches), dtype=np.int64)
    for number, stage in enumerate(costs.stages):
        each = _as_tokens(own * stage.slice_dkv_bytes, stage)
        removed[number] = _of_micro_batches(plan, each)
        added[number] = _of_micro_batches(plan, np.where(ends, _carried(each, plan.before, plan.ring_start), 0))
    return added, removed


def _continued_tokens(plan: StepPlan) -> Ints:
    """The tokens of each shard if its slice has later ones, else 0, [K]."""
    return np.where(plan.continued[plan.shard_slice], shard_tokens(plan), 0)


def _of_micro_batches(plan: StepPlan, of_shards: Ints) -> Ints:
    """Sum the values of shards [K] for each micro-batch, [M]."""
    sums = np.zeros(plan.micro_batches, dtype=np.int64)
    np.add.at(sums, plan.shard_micro, of_shards)
    return sums


def _as_tokens(held_bytes: Ints, stage: Costs) -> Ints:
    """How many tokens' activations take so many bytes on a stage, rounded up."""
    return -(-held_bytes * stage.in_flight // max(1, stage.token_bytes))


def peak_bytes(plan: StepPlan, costs: Costs) -> Ints:
    """Return the peak bytes of a device in each micro-batch, [M]; in a pipeline on the stage that decides."""
    tokens, buffers = micro_loads(plan)
    waiting = list(in_flight(plan, costs).tokens) if plan.mode == "pipeline" else None
    return costs.peak_bytes(tokens, buffers, plan.offload, waiting)


def host_bytes(plan: StepPlan, costs: Costs, held: InFlight) -> Ints:
    """Return the bytes that each micro-batch of a pipeline and those in flight with it put on the host, [M].

    The host reserves as much for each of them as the largest one of its rank needs.
    """
    most = np.zeros(plan.micro_batches, dtype=np.int64)
    tokens = micro_tokens(plan)
    for number, stage in enumerate(costs.stages):
        largest = np.zeros(plan.ranks, dtype=np.int64)
        np.maximum.at(largest, plan.micro_rank, stage.host_bytes(tokens, plan.offload))
        count = held.offloading[number] + (plan.offload > 0)
        most = np.maximum(most, -(-largest[plan.micro_rank] * count // stage.in_flight))
    return most


@njit
def _in_flight(
    held: Ints, added: Ints, removed: Ints, saved: Ints, offload: Ints, micro_start: Ints, passes: Ints
) -> tuple[Ints, Ints]:
    """Compiled part of `in_flight`.

    Each micro-batch holds held [n, M] tokens from its forward to its backward pass, saved [n, M] of them activations.
    Its backward pass adds added [n, M] tokens of gradients, and removes removed [n, M].
    """
    stages = len(held)
    tokens, offloading = np.zeros_like(held), np.zeros_like(held)
    for rank in range(len(micro_start) - 1):
        live, away = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
        for number in passes:
            micro, stage = micro_start[rank] + number // (2 * stages), number // 2 % stages
            if micro >= micro_start[rank + 1]:
                continue
            sign = 1 - 2 * (number % 2)
            live[stage] += sign * held[stage, micro]
            away[stage] += sign * int(offload[micro] > 0)
            if sign < 0:
                live[stage] += added[stage, micro]
                tokens[stage, micro] = live[stage] + held[stage, micro] - saved[stage, micro]
                offloading[stage, micro] = away[stage]
                live[stage] -= removed[stage, micro]
    return tokens, offloading


@njit
def _shard_tokens(lengths: Ints, ring_start: Ints) -> Ints:
    """Compiled part of `shard_tokens`."""
    tokens = np.empty(ring_start[-1], np.int64)
    for at in range(len(lengths)):
        first, degree = ring_start[at], ring_start[at + 1] - ring_start[at]
        size, longer = divmod(lengths[at], 2 * degree)
        for part in range(degree):
            tokens[first + part] = 2 * size + int(part < longer) + int(2 * degree - 1 - part < longer)
    return tokens


@njit
def _shard_pairs(lengths: Ints, before: Ints, ring_start: Ints, window: int, windowed: float) -> Floats:
    """Compiled part of `shard_pairs`."""
    found = np.empty(ring_start[-1])
    for at in range(len(lengths)):
        first, degree = ring_start[at], ring_start[at + 1] - ring_start[at]
        for part in range(degree):
            found[first + part] = mean_pairs(lengths[at], before[at], degree, part, window, windowed)
    return found


@njit
def mean_pairs(length: int, before: int, degree: int, part: int, window: int, windowed: float) -> float:
    """Return the (query, key) pairs of part `part` of a slice on a ring of `degree`, on average over the layers.

    The slice has `length` tokens after `before` tokens of its sequence. The fraction `windowed` of the layers has
    attention windows of `window` tokens.
    """
    size, longer = divmod(length, 2 * degree)
    found = within = 0
    for chunk in (part, 2 * degree - 1 - part):
        start, stop = before + chunk_start(size, longer, chunk), before + chunk_start(size, longer, chunk + 1)
        found += pairs_upto(stop, WHOLE) - pairs_upto(start, WHOLE)
        within += pairs_upto(stop, window) - pairs_upto(start, window)
    return found + windowed * (within - found)


def passing_tokens(plan: StepPlan) -> Ints:
    """Return the tokens whose K,V pass through the rank of each shard in one pass, [K]: those of its column of teams.

    Without teams these are all tokens of the slice and of the earlier ones.
    """
    if int(plan.team.max()) == 1:
        return (plan.before + plan.lengths)[plan.shard_slice]
    return _passing(carried_tokens(plan), plan.team, plan.ring_start)


@njit
def _passing(carried: Ints, team: Ints, ring_start: Ints) -> Ints:
    """Compiled part of `passing_tokens`."""
    passing = np.zeros_like(carried)
    for at in range(len(team)):
        first, end = ring_start[at], ring_start[at + 1]
        for place in range(team[at]):
            passing[first + place : end : team[at]] = carried[first + place : end : team[at]].sum()
    return passing


@njit
def _carried(tokens: Ints, before: Ints, ring_start: Ints) -> Ints:
    """Compiled part of `carried_tokens`: each slice adds its own `tokens` [K] to those of the slice before it."""
    carried = tokens.copy()
    for at in range(1, len(before)):
        if before[at] > 0:
            degree = ring_start[at + 1] - ring_start[at]
            for shard in range(ring_start[at], ring_start[at + 1]):
                carried[shard] += carried[shard - degree]
    return carried


@njit
def _micro_loads(
    lengths: Ints, before: Ints, team: Ints, ring_start: Ints, shard_micro: Ints, micro_batches: int, most: int
) -> tuple[Ints, Ints]:
    """Compiled part of `micro_loads`: tokens, and tokens of ring buffers, of each micro-batch, [M] each."""
    tokens, buffers = np.zeros(micro_batches, np.int64), np.zeros(micro_batches, np.int64)
    prefix = 0  # tokens of the largest prefix of the slice
    for at in range(len(lengths)):
        first, degree = ring_start[at], ring_start[at + 1] - ring_start[at]
        prefix = prefix if before[at] > 0 else 0
        sliced = before[at] > 0 or (at + 1 < len(before) and before[at + 1] > 0)
        if degree == 1:  # the most frequent case, and integer divisions are slow
            tokens[shard_micro[first]] += lengths[at]
            prefix += lengths[at]
            if sliced:
                buffers[shard_micro[first]] += -(-prefix // most)
            continue
        size, longer = divmod(lengths[at], 2 * degree)
        largest = -(-lengths[at] // degree)
        turns = degree // team[at]
        call = call_of_round(turns - 1, most)  # the last one; the one before it is full
        rounds = turns - call_start(call, most)
        if call > 0:
            rounds = max(rounds, call_start(call, most) - call_start(call - 1, most))
        held = -(-(prefix + largest) * rounds // most) * team[at]
        for part in range(degree):
            micro = shard_micro[first + part]
            tokens[micro] += 2 * size + int(part < longer) + int(2 * degree - 1 - part < longer)
            buffers[micro] += held
        prefix += largest
    return tokens, buffers


@njit
def _near(hops: Ints, ring_ranks: Ints) -> Ints:
    """Return the ranks that each shard is sent to, and received from, in each of `hops` [H, K]: [K, 2H]."""
    near = np.empty((len(ring_ranks), 2 * len(hops)), np.int64)
    for number in range(len(hops)):
        for shard in range(len(ring_ranks)):
            following = hops[number, shard]
            near[shard, 2 * number] = ring_ranks[following]
            near[following, 2 * number + 1] = ring_ranks[shard]
    return near


@njit
def _peers(micro_start: Ints, shard_start: Ints, shard_order: Ints, near: Ints) -> Ints:
    """Count the peers of each rank, [P]: the rank of shard k exchanges messages with the ranks near[k]."""
    ranks = len(micro_start) - 1
    counted_by = np.full(ranks, -1)  # by peer: the last rank that counted it
    count = np.zeros(ranks, np.int64)
    for rank in range(ranks):
        for place in range(shard_start[micro_start[rank]], shard_start[micro_start[rank + 1]]):
            for number in range(near.shape[1]):
                peer = near[shard_order[place], number]
                if peer != rank and counted_by[peer] != rank:
                    counted_by[peer] = rank
                    count[rank] += 1
    return count
