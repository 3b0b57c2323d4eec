"""The rules of `verify` written a second time, in plain Python over sets and an explicit graph: slow and independent.

It shares with engine/planner only the splitting of sequences (schedule.py) and the names of arrays.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import ceil

import numpy as np

from engine.cost.model import Costs
from engine.cost.times import rounds_per_call
from engine.planner.plan import schedule
from engine.planner.plan.step_plan import StepPlan
from engine.planner.planners import PLANNERS
from engine.planner.settings import PlanSettings
from tests.planner.executor import order_of, slices_in_order

Node = tuple[str, int, int, str]  # "pass", gang, stage, direction; "move", micro-batch, stage, direction; "reduction"


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
    staged = plan.mode == "pipeline"
    passes = 2 * plan.stages * max(end - first for first, end in pairwise(rows["micro_start"])) if staged else 0
    bounds = {
        "lengths": (sequences, 1, 2**35 - 1),
        "before": (sequences, 0, 2**35 - 1),
        "team": (sequences, 1, plan.ranks),
        "passes": (passes, 0, passes - 1),
        "ring_ranks": (shards, 0, plan.ranks - 1),
        "shard_order": (shards, 0, shards - 1),
        "gang": (micros, 0, micros - 1),
        "slot": (micros, -1, micros - 1),
        "offload": (micros, 0, settings.offload),
        "overlap": (plan.ranks, 0, 1),
    }
    for name, (count, low, high) in bounds.items():
        if len(rows[name]) != count or any(not low <= value <= high for value in rows[name]):
            return False
    degrees = [end - first for first, end in pairwise(rows["ring_start"])]
    if any(degree % team for degree, team in zip(degrees, rows["team"], strict=True)):
        return False
    return sequences > 0 and sum(rows["lengths"]) <= 2**35 and len(set(rows["passes"])) == passes


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
    """Every shard is in one micro-batch of its rank, and each slice begins where the one before it ends, or at 0."""
    ends = [0, *(int(before + length) for before, length in zip(plan.before, plan.lengths, strict=True))]
    if any(before not in (0, end) for before, end in zip(plan.before.tolist(), ends, strict=False)):
        return False
    found = sorted(shard for micro in micros for shard in micro.shards)
    every = [(sequence, part) for sequence, ring in enumerate(rings) for part in range(len(ring))]
    return found == every and all(rings[s][part] == micro.rank for micro in micros for s, part in micro.shards)


def _memory(plan: StepPlan, settings: PlanSettings, rings: list[list[int]], micros: list[Micro]) -> bool:
    """Each micro-batch fits, on each stage beside those whose backward pass is to come."""
    costs = settings.costs
    for micro in micros:
        tokens = _held(plan, rings, micro)
        ratio = Fraction(micro.offload, 1_000_000)
        stays = ceil(tokens * (2 + (1 - ratio) * (costs.layers - 2)) / costs.layers)
        if stays > settings.capacities[micro.rank]:
            return False
    for rank in range(plan.ranks):
        own = [micro for micro in micros if micro.rank == rank]
        for stage in range(plan.stages):
            live: Counter[int] = Counter()  # -1 if a damaged order has the backward pass first
            backward: list[Micro] = []  # whose backward pass has begun
            for place, direction in order_of(plan, len(own), stage):
                if direction == "forward":
                    live[place] += 1
                    continue
                live[place] -= 1
                others = [(own[other], count) for other, count in live.items()] if plan.mode == "pipeline" else []
                backward.append(own[place])
                costs = settings.costs.stages[stage]
                if not _fits(plan, settings, costs, rings, own[place], others, own, backward):
                    return False
    return True


def _held(plan: StepPlan, rings: list[list[int]], micro: Micro) -> int:
    """Return the tokens of a micro-batch."""
    return sum(schedule.shard_tokens(int(plan.lengths[s]), len(rings[s]), part) for s, part in micro.shards)


def _stays(plan: StepPlan, rings: list[list[int]], micro: Micro, layers: int) -> int:
    ratio = Fraction(micro.offload, 1_000_000)
    return ceil(_held(plan, rings, micro) * (2 + (1 - ratio) * (layers - 2)) / layers)


def _besides(plan: StepPlan, costs: Costs, rings: list[list[int]], micro: Micro) -> int:
    """Return the K,V that slices keep, and what teams exchange, as tokens."""
    total = 0
    for s, part in micro.shards:
        tokens = schedule.shard_tokens(int(plan.lengths[s]), len(rings[s]), part)
        total += tokens * costs.slice_kv_bytes * (_last(plan, s) > s)
        total += tokens * (int(plan.team[s]) - 1) * costs.team_bytes
    return ceil(Fraction(total * costs.in_flight, costs.token_bytes))


def _gradients(plan: StepPlan, costs: Costs, rings: list[list[int]], own: list[Micro], backward: list[Micro]) -> int:
    """Return the gradients of slices' K,V, as tokens, when the last one of the passes `backward` of a rank begins.

    They are there from the pass of the last slice to their own. A pass in the wrong order counts as -1 until then.
    """
    total = 0
    for s, part in [shard for micro in own for shard in micro.shards]:
        tokens = schedule.shard_tokens(int(plan.lengths[s]), len(rings[s]), part)
        begun = any((_last(plan, s), part) in micro.shards for micro in backward)
        ended = any((s, part) in micro.shards for micro in backward[:-1])
        if _last(plan, s) > s:
            total += (begun - ended) * ceil(
                Fraction(tokens * costs.slice_dkv_bytes * costs.in_flight, costs.token_bytes)
            )
    return total


def _last(plan: StepPlan, at: int) -> int:
    """Return the last slice of the sequence of a slice."""
    while at + 1 < len(plan.before) and plan.before[at + 1] > 0:
        at += 1
    return at


def _fits(
    plan: StepPlan,
    settings: PlanSettings,
    costs: Costs,
    rings: list[list[int]],
    micro: Micro,
    others: list[tuple[Micro, int]],
    own: list[Micro],
    backward: list[Micro],
) -> bool:
    """Whether a micro-batch fits on a stage beside `others`, with counts; `own` are all micro-batches of its rank.

    `backward` are those whose backward passes have begun, this one included.
    """
    tokens, stays = _held(plan, rings, micro), _stays(plan, rings, micro, costs.layers)
    buffers = 0
    for s, _ in micro.shards:
        earlier, at = [int(plan.lengths[s])], s
        while plan.before[at] > 0:
            at -= 1
            earlier.append(int(plan.lengths[at]))
        cut = len(earlier) > 1 or (s + 1 < len(plan.before) and plan.before[s + 1] > 0)
        if len(rings[s]) > 1 or cut:
            largest = sum(ceil(Fraction(length, len(rings[s]))) for length in earlier)
            team = int(plan.team[s])
            most = rounds_per_call(plan.stages)
            calls = Counter(schedule.call_of_round(round_, most) for round_ in range(len(rings[s]) // team))
            buffers += ceil(Fraction(largest * max(calls.values()), most)) * team
    waiting = 0
    for other, count in others:
        waiting += count * (_stays(plan, rings, other, costs.layers) + _besides(plan, costs, rings, other))
    if plan.mode == "pipeline":
        waiting += _besides(plan, costs, rings, micro)
        waiting += _gradients(plan, costs, rings, own, backward)
    layer, loss = (instant.fixed + instant.token * tokens for instant in costs.instants)
    each = Fraction(costs.token_bytes, costs.in_flight)  # of one micro-batch
    saved = each * (stays + waiting)
    peak = costs.fixed_bytes + max(saved + max(layer, loss) + costs.ring_bytes * buffers, costs.closing_bytes)
    if plan.mode == "pipeline":  # the host reserves as much for each as the largest one of the rank needs
        count = (micro.offload > 0) + sum(count for other, count in others if other.offload > 0)
        host = count * max(_held(plan, rings, one) - _stays(plan, rings, one, costs.layers) for one in own)
        host *= each
    else:
        host = each * (tokens - stays)
    return peak <= int(settings.cluster.memory[micro.rank]) and host <= settings.host_memory


def _gangs(plan: StepPlan, settings: PlanSettings, rings: list[list[int]], micros: list[Micro]) -> bool:
    """Slices keep their ring; the ranks of a ring are distinct; gangs are the connected sets, of distinct ranks."""
    if any(plan.before[at] > 0 and rings[at] != rings[at - 1] for at in range(len(rings))):
        return False
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
    """No chain of passes, transfers and the reduction, each waiting for the one before it, returns to its start.

    All ranks enter the reduction, a marked one within its last pass. So the members of that pass's gang, which wait for
    this rank in it, wait for the reduction. That they enter it later closes the chain.
    """
    last = plan.stages - 1
    waits: dict[Node, set[Node]] = defaultdict(set)
    if plan.mode != "free" and plan.overlap.any():
        return False
    for rank in range(plan.ranks if plan.mode == "free" else 0):
        own = [micro for micro in micros if micro.rank == rank]
        waits["reduction", 0, 0, ""].add(("pass", own[-1].gang, 0, "forward"))
        if any(len(rings[sequence]) > 1 for sequence, _ in own[-1].shards):
            waits["reduction", 0, 0, ""].add(("pass", own[-1].gang, 0, "backward"))
            if plan.overlap[rank]:
                waits["pass", own[-1].gang, 0, "backward"].add(("reduction", 0, 0, ""))
    for gang in {micro.gang for micro in micros}:
        waits["pass", gang, last, "backward"].add(("pass", gang, last, "forward"))
    for rank in range(plan.ranks):
        own = [at for at, micro in enumerate(micros) if micro.rank == rank]
        for stage in range(plan.stages):
            line: list[Node] = []
            for place, direction in order_of(plan, len(own), stage):
                line.append(("pass", micros[own[place]].gang, stage, direction))
            for before, after in pairwise(line):
                waits[after].add(before)
        ran: dict[int, Node] = {}
        moved: dict[int, Node] = {}
        for number in plan.passes.tolist():
            place, rest = divmod(number, 2 * plan.stages)
            if place >= len(own):
                continue
            stage, direction = rest // 2, "backward" if rest % 2 else "forward"
            target = stage + (-1 if rest % 2 else 1)
            ran[stage] = ("pass", micros[own[place]].gang, stage, direction)
            if not 0 <= target <= last:
                continue
            move: Node = ("move", own[place], stage, direction)
            waits[move] |= {
                ran[stage],
                *(row[at] for row, at in ((ran, target), (moved, stage), (moved, target)) if at in row),
            }
            waits["pass", micros[own[place]].gang, target, direction].add(move)
            moved[stage] = moved[target] = move
    left = {node for edge in waits.items() for node in (edge[0], *edge[1])}
    while left:
        free = {node for node in left if not waits[node] & left}
        if not free:
            return False
        left -= free
    return slices_in_order(plan)


def _slots(plan: StepPlan, settings: PlanSettings, rings: list[list[int]], micros: list[Micro]) -> bool:
    if plan.mode != "lockstep":
        return all(micro.slot == -1 for micro in micros)
    of_rank = [[micro.slot for micro in micros if micro.rank == rank] for rank in range(plan.ranks)]
    same = all(slots == list(range(len(of_rank[0]))) for slots in of_rank)
    return same and len({(micro.gang, micro.slot) for micro in micros}) == len({micro.gang for micro in micros})


def _messages(plan: StepPlan, settings: PlanSettings, rings: list[list[int]], micros: list[Micro]) -> bool:
    """Of each kind of message: K,V to the next team, expert counts to the next part, and queries to each mate."""
    sent, received = defaultdict(list), defaultdict(list)
    for micro in micros:
        for sequence, part in micro.shards:
            ring, team = rings[sequence], int(plan.team[sequence])
            hops = {"kv": (part + team, part - team), "counts": (part + 1, part - 1)}
            for kind, (there, back) in hops.items():
                if len(ring) > 1:
                    sent[kind, micro.gang, micro.rank, ring[there % len(ring)]].append(sequence)
                    received[kind, micro.gang, ring[back % len(ring)], micro.rank].append(sequence)
            for mate in _mates(part, team):
                sent[(mate - part) % team, micro.gang, micro.rank, ring[mate]].append(sequence)
                received[(part - mate) % team, micro.gang, ring[mate], micro.rank].append(sequence)
    return sent == received


def _mates(part: int, team: int) -> list[int]:
    """Return the other parts of a part's team."""
    return [other for other in range(part // team * team, part // team * team + team) if other != part]


def _peers(plan: StepPlan, settings: PlanSettings, rings: list[list[int]], micros: list[Micro]) -> bool:
    peers = defaultdict(set)
    for ring, team in zip(rings, plan.team.tolist(), strict=True):
        for at, rank in enumerate(ring):
            near = [at - 1, at + 1, at - team, at + team, *_mates(at, team)]
            peers[rank] |= {ring[other % len(ring)] for other in near} - {rank}
    named = PLANNERS[settings.planner].peers(settings)
    known = all(other in named[rank] or rank in named[other] for rank, found in peers.items() for other in found)
    return known and all(len(found) <= settings.max_peers for found in peers.values())
