"""The rules of `verify` written a second time, in plain Python over sets and an explicit graph: slow and independent.

It shares with engine/planner only the splitting of sequences (schedule.py) and the names of arrays.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil, floor

import numpy as np

from engine.planner.plan import schedule
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from tests.planner.executor import passes

Node = tuple[int, int, str]  # gang, stage, direction


@dataclass
class Micro:
    """A micro-batch: its rank, its gang, and (sequence, part) of its shards in order."""

    rank: int
    gang: int
    slot: int
    offload: int
    shards: list[tuple[int, int]]


def broken(plan: StepPlan, settings: PlanSettings) -> int | None:
    """Return the number of the first rule that a plan breaks, or None."""
    if not _well_formed(plan, settings):
        return 0
    start, ranks = plan.ring_start.tolist(), plan.ring_ranks.tolist()
    rings = [ranks[first:end] for first, end in pairwise(start)]
    micros = _micros(plan, start)
    rules = (_tokens, _memory, _gangs, _order, _slots, _messages, _peers)
    held = (rule(plan, settings, rings, micros) for rule in rules)
    return next((number for number, holds in enumerate(held, start=1) if not holds), None)


def _well_formed(plan: StepPlan, settings: PlanSettings) -> bool:
    asked = (settings.mode, settings.stages, settings.ranks, settings.capacity)
    if (plan.mode, plan.stages, plan.ranks, plan.capacity) != asked:
        return False
    if any(array.dtype != np.int64 or array.ndim != 1 for array in plan.arrays().values()):
        return False
    rows = {name: array.tolist() for name, array in plan.arrays().items()}
    sequences, shards, micros = len(rows["lengths"]), len(rows["ring_ranks"]), len(rows["gang"])
    sizes = {"ring_start": (sequences, shards, 1), "micro_start": (plan.ranks, micros, 1)}
    for name, (count, end, least) in {**sizes, "shard_start": (micros, shards, 0)}.items():
        row = rows[name]
        if len(row) != count + 1 or row[0] != 0 or row[-1] != end:
            return False
        if any(after - before < least for before, after in pairwise(row)):
            return False
    bounds = {
        "lengths": (sequences, 1, 2**35 - 1),
        "ring_ranks": (shards, 0, plan.ranks - 1),
        "shard_order": (shards, 0, shards - 1),
        "gang": (micros, 0, micros - 1),
        "slot": (micros, -1, micros - 1),
        "offload": (micros, 0, settings.offload),
    }
    for name, (count, low, high) in bounds.items():
        if len(rows[name]) != count or any(not low <= value <= high for value in rows[name]):
            return False
    return sequences > 0 and sum(rows["lengths"]) <= 2**35


def _micros(plan: StepPlan, start: list[int]) -> list[Micro]:
    place = [(s, shard - first) for s, (first, end) in enumerate(pairwise(start)) for shard in range(first, end)]
    micros = []
    for rank in range(plan.ranks):
        for index in _row(plan.micro_start.tolist(), rank):
            shards = [place[plan.shard_order[at]] for at in _row(plan.shard_start.tolist(), index)]
            gang, slot, offload = (int(row[index]) for row in (plan.gang, plan.slot, plan.offload))
            micros.append(Micro(rank, gang, slot, offload, shards))
    return micros


def _row(start: list[int], row: int) -> range:
    return range(start[row], start[row + 1])


def _tokens(plan: StepPlan, settings: PlanSettings, rings: list[list[int]], micros: list[Micro]) -> bool:
    """Every shard is in one micro-batch of its rank."""
    found = sorted(shard for micro in micros for shard in micro.shards)
    every = [(sequence, part) for sequence, ring in enumerate(rings) for part in range(len(ring))]
    return found == every and all(rings[s][part] == micro.rank for micro in micros for s, part in micro.shards)


def _memory(plan: StepPlan, settings: PlanSettings, rings: list[list[int]], micros: list[Micro]) -> bool:
    costs = settings.costs
    for micro in micros:
        tokens = sum(schedule.shard_tokens(int(plan.lengths[s]), len(rings[s]), part) for s, part in micro.shards)
        buffers = sum(ceil(Fraction(int(plan.lengths[s]), len(rings[s]))) for s, _ in micro.shards if len(rings[s]) > 1)
        ratio = Fraction(micro.offload, 1_000_000)
        stays = ceil(tokens * (2 + (1 - ratio) * (costs.layers - 2)) / costs.layers)
        layer, loss = (instant.fixed + instant.token * tokens for instant in costs.instants)
        saved = costs.token_bytes * stays
        left = Fraction(min(2, costs.layers), costs.layers)  # the layers that are back at the end of the backward pass
        two_left = ceil(left * costs.token_bytes * tokens) + floor((1 - left) * costs.passing_bytes) + layer
        fullest = max(saved + layer, saved + loss, two_left, costs.passing_bytes + layer)
        peak = costs.fixed_bytes + max(fullest + costs.ring_bytes * buffers, costs.closing_bytes)
        host = costs.token_bytes * (tokens - stays)
        memory = int(settings.cluster.memory[micro.rank])
        if stays > settings.capacities[micro.rank] or peak > memory or host > settings.host_memory:
            return False
    return True


def _gangs(plan: StepPlan, settings: PlanSettings, rings: list[list[int]], micros: list[Micro]) -> bool:
    """The ranks of a ring are distinct; gangs are the connected sets, and have distinct ranks."""
    connected = [{at} for at in range(len(micros))]
    for sequence in range(len(rings)):
        together = [at for at, micro in enumerate(micros) if sequence in [s for s, _ in micro.shards]]
        union = set().union(*(connected[at] for at in together))
        for at in union:
            connected[at] = union
    gangs = defaultdict(set)
    for at, micro in enumerate(micros):
        gangs[micro.gang].add(at)
    return (
        all(len(set(ring)) == len(ring) for ring in rings)
        and all(gangs[micro.gang] == connected[at] for at, micro in enumerate(micros))
        and all(len({micros[at].rank for at in members}) == len(members) for members in gangs.values())
    )


def _order(plan: StepPlan, settings: PlanSettings, rings: list[list[int]], micros: list[Micro]) -> bool:
    """No chain of passes, each waiting for the one before it, returns to its start."""
    last = plan.stages - 1
    waits: dict[Node, set[Node]] = defaultdict(set)
    for gang in {micro.gang for micro in micros}:
        way: list[Node] = [(gang, stage, "forward") for stage in range(plan.stages)]
        way += [(gang, last - stage, "backward") for stage in range(plan.stages)]
        for before, after in pairwise(way):
            waits[after].add(before)
    for rank in range(plan.ranks):
        own = [micro for micro in micros if micro.rank == rank]
        for stage in range(plan.stages):
            line = [(own[index].gang, stage, direction) for index, direction in passes(len(own), stage, plan.stages)]
            for before, after in pairwise(line):
                waits[after].add(before)
    left = {node for edge in waits.items() for node in (edge[0], *edge[1])}
    while left:
        free = {node for node in left if not waits[node] & left}
        if not free:
            return False
        left -= free
    return True


def _slots(plan: StepPlan, settings: PlanSettings, rings: list[list[int]], micros: list[Micro]) -> bool:
    if plan.mode != "lockstep":
        return all(micro.slot == -1 for micro in micros)
    of_rank = [[micro.slot for micro in micros if micro.rank == rank] for rank in range(plan.ranks)]
    same = all(slots == list(range(len(of_rank[0]))) for slots in of_rank)
    return same and len({(micro.gang, micro.slot) for micro in micros}) == len({micro.gang for micro in micros})


def _messages(plan: StepPlan, settings: PlanSettings, rings: list[list[int]], micros: list[Micro]) -> bool:
    sent, received = defaultdict(list), defaultdict(list)
    for micro in micros:
        for sequence, part in micro.shards:
            ring = rings[sequence]
            if len(ring) > 1:
                sent[micro.rank, ring[(part + 1) % len(ring)]].append(sequence)
                received[ring[part - 1], micro.rank].append(sequence)
    return sent == received


def _peers(plan: StepPlan, settings: PlanSettings, rings: list[list[int]], micros: list[Micro]) -> bool:
    peers = defaultdict(set)
    for ring in rings:
        for at, rank in enumerate(ring):
            if len(ring) > 1:
                peers[rank] |= {ring[at - 1], ring[(at + 1) % len(ring)]}
    return all(len(found) <= settings.max_peers for found in peers.values())
