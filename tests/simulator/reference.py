"""A slow simulator in plain Python, the reference for the fast one. Both share only the plan and the schedule.

Both simplify a real ring in two ways: the pairs of a shard are spread evenly over the rounds, and every buffer that a
member sends is as large as its own shard with its prefix. Times are nanoseconds.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np

from engine.planner.plan import schedule
from engine.planner.plan.step_plan import MicroBatch, Shard, StepPlan
from engine.planner.settings import PlanSettings
from tests.planner.executor import order_of


class Pass(NamedTuple):
    """One pass of a gang."""

    seconds: float
    exposed: float  # the part that only waits for transfers
    compute: dict[int, float]  # by rank


class Call(NamedTuple):
    """A call of attention: its rounds, and the rounds whose K,V and dK,dV are sent meanwhile."""

    rounds: list[int]
    arriving: list[int]
    leaving: list[int]


@dataclass
class Machine:
    """Computes the passes of gangs under some settings."""

    settings: PlanSettings

    def tokens(self, shard: Shard) -> int:
        return schedule.shard_tokens(shard.length, shard.degree, shard.part)

    def pairs(self, shard: Shard) -> float:
        """Count the keys of each query, one by one: that at position p has p + 1, but at most a window's, if any."""
        spans, before = schedule.shard_spans(shard.length, shard.degree, shard.part), sum(shard.earlier)
        keys = [before + p + 1 for span in spans for p in range(span.start, span.stop)]
        rates = self.settings.costs.rates
        return (1 - rates.windowed) * sum(keys) + rates.windowed * sum(min(one, rates.window) for one in keys)

    def carried(self, shard: Shard) -> int:
        """Tokens whose K,V the shard's part sends: of all slices so far."""
        lengths = (*shard.earlier, shard.length)
        return sum(schedule.shard_tokens(length, shard.degree, shard.part) for length in lengths)

    def slow(self, rank: int) -> float:
        return 100.0 / float(self.settings.cluster.speed[rank])

    def leaves(self, shard: Shard) -> bool:
        """True if the shard's hop to the next team, or one to a mate, leaves the node."""
        first = shard.part - shard.part % shard.team
        near = [(shard.part + shard.team) % shard.degree, *range(first, first + shard.team)]
        place = self.settings.cluster.place
        return any(place(shard.ring[shard.part])[0] != place(shard.ring[other])[0] for other in near)

    def pass_(self, gang: list[MicroBatch], direction: schedule.Direction) -> Pass:
        """Return a gang's pass: the longest linear part, then the rounds, and at least the copies to the host."""
        rates = self.settings.costs.rates
        linear = {micro.rank: self.linear(micro, direction) for micro in gang}
        seconds, exposed, compute = max(linear.values()), 0.0, linear
        runs: list[schedule.Direction] = [direction]
        if direction == "backward" and rates.recompute_factor:
            runs.append("forward")
        for run in runs:
            exchanged = max(sum(self.exchanged(shard, run) for shard in micro.shards) for micro in gang)
            seconds, exposed = seconds + exchanged, exposed + exchanged
            for call in self.calls(gang, run):
                work = {micro.rank: self.work(micro, call, run) for micro in gang}
                longest = max(self.hide(work[micro.rank], self.transfer(micro, gang, call, run)) for micro in gang)
                seconds += longest
                exposed += longest - max(work.values())
                compute = {rank: compute[rank] + work[rank] for rank in compute}
        copies = [rates.copy * micro.offload * sum(map(self.tokens, micro.shards)) for micro in gang]
        return Pass(max(seconds, *copies), exposed, compute)

    def linear(self, micro: MicroBatch, direction: schedule.Direction) -> float:
        """Return the compute of a rank outside its rings: unsplit sequences, and the linear layers of all shards."""
        if not micro.shards:
            return 0.0
        rates, forward = self.settings.costs.rates, direction == "forward"
        fraction = 1 / 3 if forward else 2 / 3
        token = rates.token_f if forward else rates.token_b
        pair = rates.pair_f if forward else rates.pair_b + rates.recompute_factor * rates.pair_f
        total = fraction * rates.micro
        for shard in micro.shards:
            total += fraction * rates.sequence + token * self.tokens(shard)
            total += pair * self.pairs(shard) if shard.degree == 1 else 0.0
        return total * self.slow(micro.rank)

    def exchanged(self, shard: Shard, direction: schedule.Direction) -> float:
        """Return the time in which a rank sends the queries of a shard to its team, and gets their results."""
        if shard.team == 1:
            return 0.0
        rates = self.settings.costs.rates
        each = (1 if direction == "forward" else 3) * rates.query + rates.result
        slowdown = rates.inter_node_slowdown if self.leaves(shard) else 1.0
        return 2 * rates.latency + slowdown * (shard.team - 1) * self.tokens(shard) * each

    def calls(self, gang: list[MicroBatch], direction: schedule.Direction) -> list[Call]:
        """Return the rounds of each call, and the hops of K,V and of dK,dV that run meanwhile."""
        turns = max((s.degree // s.team for m in gang for s in m.shards), default=0)
        most = self.settings.costs.rates.rounds_per_call
        numbered = groupby(range(turns), lambda round_: schedule.call_of_round(round_, most))
        rounds = [list(members) for _, members in numbered] + [[]]
        found = []
        for own, before, after in zip(rounds, [[], *rounds], [*rounds[1:], []], strict=False):
            leaving = [round_ + 1 for round_ in before] if direction == "backward" else []
            found.append(Call(own, [round_ - 1 for round_ in after], leaving))
        return found

    def work(self, micro: MicroBatch, call: Call, direction: schedule.Direction) -> float:
        """Return the compute of a rank in a call."""
        rates = self.settings.costs.rates
        pair = rates.pair_f if direction == "forward" else rates.pair_b
        total, starts = 0.0, False
        for s in micro.shards:
            turns = s.degree // s.team
            rounds = [round_ for round_ in call.rounds if round_ < turns]
            if s.degree == 1 or not rounds or not self.tokens(s):
                continue
            total += pair * self.pairs(s) / turns * len(rounds)
            if 0 not in rounds or s.team > 1 or s.earlier:  # else only the causal call, which every micro-batch has
                starts = True
                total += rates.merge * self.tokens(s) * s.team + rates.ring
        return (total + rates.round * starts) * self.slow(micro.rank)

    def transfer(self, micro: MicroBatch, gang: list[MicroBatch], call: Call, direction: schedule.Direction) -> float:
        """Return the time of a rank's transfers, or of all transfers that leave its node if their cards are slower."""
        rates, node = self.settings.costs.rates, self.settings.cluster.place(micro.rank)[0]
        same_node = [m for m in gang if self.settings.cluster.place(m.rank)[0] == node]
        own = sum(self.sent(shard, call, direction) for shard in micro.shards)
        cards = sum(self.sent(s, call, direction) for m in same_node for s in m.shards if self.leaves(s))
        latency = 0.0
        for shard in micro.shards:
            if self.carried(shard):
                latency = max(latency, len(self.posted(shard, call, direction)) * rates.latency)
        return max(own, cards / self.settings.costs.nics) + latency

    def posted(self, shard: Shard, call: Call, direction: schedule.Direction) -> list[schedule.Kind]:
        """Return the kinds of the messages that a shard sends during a call."""
        rounds = [("kv", round_) for round_ in call.arriving] + [("dkv", round_) for round_ in call.leaving]
        return [
            one.kind
            for kind, round_ in rounds
            for one in schedule.transfers(shard.degree, shard.part, round_, direction, shard.team)
            if one.kind == kind
        ]

    def sent(self, shard: Shard, call: Call, direction: schedule.Direction) -> float:
        rates = self.settings.costs.rates
        one = {"kv": rates.kv, "dkv": rates.dkv}
        times = rates.inter_node_slowdown if self.leaves(shard) else 1.0
        return times * self.carried(shard) * sum(one[kind] for kind in self.posted(shard, call, direction))

    def slot(self, forward: float, backward: float) -> float:
        """Return the time of a lockstep slot whose longest gang takes these times."""
        costs = self.settings.costs
        return self.hide(forward, costs.gathers[0]) + self.hide(backward, costs.gathers[1]) + costs.slot

    def hide(self, work: float, transfer: float) -> float:
        overlap = self.settings.costs.rates.overlap
        return max(work, transfer) + (1 - overlap) * min(work, transfer)


@dataclass
class Line:
    """Start and stop by number of micro-batch; `compute` and `exposed` are sums over ranks."""

    start: dict[int, float] = field(default_factory=dict)
    stop: dict[int, float] = field(default_factory=dict)
    compute: float = 0.0
    exposed: float = 0.0
    makespan: float = 0.0


Node = tuple[int, int, str]  # gang, stage, direction


def gangs_of(plan: StepPlan) -> dict[int, list[MicroBatch]]:
    gangs: dict[int, list[MicroBatch]] = defaultdict(list)
    for micro in map(plan.micro_batch, range(plan.micro_batches)):
        gangs[micro.gang].append(micro)
    return gangs


def slow_simulate(plan: StepPlan, settings: PlanSettings) -> Line:
    """Run the plan event by event: run any pass that can run, until none is left."""
    gangs, machine, line = gangs_of(plan), Machine(settings), Line()
    seconds: dict[tuple[int, str], float] = {}
    for number, gang in gangs.items():
        for direction in ("forward", "backward"):
            found = machine.pass_(gang, direction)
            seconds[number, direction] = found.seconds / plan.stages
            line.exposed += found.exposed * len(gang) / plan.stages
            line.compute += sum(found.compute.values()) / plan.stages
    if plan.mode == "lockstep":
        _in_slots(plan, gangs, seconds, machine, line)
    else:
        _in_turn(plan, gangs, seconds, line)
    line.makespan = max(line.stop.values())
    return line


def _in_slots(
    plan: StepPlan,
    gangs: dict[int, list[MicroBatch]],
    seconds: dict[tuple[int, str], float],
    machine: Machine,
    line: Line,
) -> None:
    now = 0.0
    for slot in range(int(plan.slot.max()) + 1):
        here = {number: gang for number, gang in gangs.items() if gang[0].slot == slot}
        ends = now + machine.slot(*(max(seconds[number, way] for number in here) for way in ("forward", "backward")))
        for micro in (micro for gang in here.values() for micro in gang):
            line.start[micro.index], line.stop[micro.index] = now, ends
        now = ends


def _in_turn(
    plan: StepPlan, gangs: dict[int, list[MicroBatch]], seconds: dict[tuple[int, str], float], line: Line
) -> None:
    """A pass runs when it is next on that stage of all its ranks and its input has arrived.

    Results move in the order of the plan's list: each when its pass has ended, its two devices have ended the transfers
    and the receiver the passes that come before it in the list.
    """
    turns = {
        (rank, stage): [
            (int(plan.gang[plan.micro_start[rank] + place]), stage, way)
            for place, way in order_of(plan, int(np.diff(plan.micro_start)[rank]), stage)
        ]
        for rank in range(plan.ranks)
        for stage in range(plan.stages)
    }
    free = dict.fromkeys(turns, 0.0)
    moves = {rank: _moves(plan, rank) for rank in range(plan.ranks)}
    moved: dict[tuple[int, int], float] = defaultdict(float)  # by device: when its last transfer ended
    arrived: dict[tuple[int, Node], float] = {}  # by rank and pass that needs it
    ends: dict[Node, float] = {}
    while any(turns.values()):
        for rank, left in moves.items():
            while left and all(node in ends for node in left[0].after):
                move = left.pop(0)
                begin = max([ends[node] for node in move.after] + [moved[rank, stage] for stage in move.stages])
                arrived[rank, move.needed_by] = begin
                for stage in move.stages:
                    moved[rank, stage] = begin
        ready = [row[0] for row in turns.values() if row and _can_run(row[0], gangs, turns, ends, arrived, plan.stages)]
        assert ready, "deadlock"
        gang, stage, way = node = ready[0]
        lines = [(micro.rank, stage) for micro in gangs[gang]]
        before = _before(node, plan.stages)
        inputs = [arrived[rank, node] for rank, _ in lines if (rank, node) in arrived]
        begin = max([free[one] for one in lines] + inputs + ([ends[before]] if before else []))
        ends[node] = begin + seconds[gang, way]
        for one in lines:
            free[one] = ends[node]
            turns[one].pop(0)
        if stage == 0:
            for micro in gangs[gang]:
                (line.start if way == "forward" else line.stop)[micro.index] = begin if way == "forward" else ends[node]


class Move(NamedTuple):
    """A transfer between two stages of a rank."""

    stages: tuple[int, int]
    after: list[Node]  # its pass, and the receiver's last one before it in the list
    needed_by: Node


def _moves(plan: StepPlan, rank: int) -> list[Move]:
    """Return the transfers of a rank in the order of the plan's list."""
    gangs = plan.gang[plan.micro_start[rank] : plan.micro_start[rank + 1]].tolist()
    last: dict[int, Node] = {}
    found = []
    for number in plan.passes.tolist():
        place, rest = divmod(number, 2 * plan.stages)
        if place >= len(gangs):
            continue
        stage, way = rest // 2, "backward" if rest % 2 else "forward"
        target = stage - 1 if rest % 2 else stage + 1
        last[stage] = (gangs[place], stage, way)
        if 0 <= target < plan.stages:
            after = [last[stage], *([last[target]] if target in last else [])]
            found.append(Move((stage, target), after, (gangs[place], target, way)))
    return found


def _before(node: Node, stages: int) -> Node | None:
    """Return the previous pass of the same gang, if any."""
    gang, stage, way = node
    if way == "forward":
        return (gang, stage - 1, "forward") if stage else None
    return (gang, stage + 1, "backward") if stage < stages - 1 else (gang, stage, "forward")


def _can_run(
    node: Node,
    gangs: dict[int, list[MicroBatch]],
    turns: dict[tuple[int, int], list[Node]],
    ends: dict[Node, float],
    arrived: dict[tuple[int, Node], float],
    stages: int,
) -> bool:
    before = _before(node, stages)
    next_everywhere = all(turns[micro.rank, node[1]][:1] == [node] for micro in gangs[node[0]])
    moves = before is not None and before[1] != node[1]
    here = not moves or all((micro.rank, node) in arrived for micro in gangs[node[0]])
    return next_everywhere and here and (before is None or before in ends)
