"""Executes a plan on simulated ranks that exchange messages as the engine does, and reports whether all ranks finish.

Each rank runs its micro-batches in order, forward and backward through every layer, and after the last layer sums the
counts of its experts. A hop is one batched group of sends and receives, and ends when all of them are matched: of the
K,V for a round of the next call of attention, and of the dK,dV of a round of the call before.
Between two ranks the n-th send matches the n-th receive, and only while both ranks are in their groups (rendezvous), so
no buffer hides a wrong order. If a send matches the receive of another buffer, the plan counts as not finishing. In
lockstep mode all ranks wait for each other before every micro-batch.

In a pipeline each stage of each rank is a separate line, number rank x stages + stage, and rings connect the lines of
one stage. Activations go to the next stage and gradients to the previous one. A line puts its transfers in a queue in
the order of the plan's list of passes, and goes on. A transfer takes place when it is first in the queues of both
lines, so a line has one at a time, and no buffer hides a wrong order. Only the pass that needs what arrives waits.

In free mode all ranks then reduce gradients, a bucket for each layer, in one order: after their last pass, or, if the
plan marks them, within their last backward pass, each bucket after its layer. A reduction is a rendezvous of all ranks.
Ranks wait in each, as on CPUs, or only for the sum of norms behind all of them, as on GPUs.

A slice that runs forward before the slice that it continues, or backward after it, would miss K,V or their gradients:
such a plan counts as not finishing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import groupby, pairwise, zip_longest
from typing import Literal

from engine.cost.times import rounds_per_call
from engine.planner.plan import schedule
from engine.planner.plan.step_plan import MicroBatch, StepPlan

LAYERS = 2  # of a stage
Direction = Literal["forward", "backward"]
Tag = tuple[object, ...]


@dataclass
class Group:
    """One batched group: (peer, tag) of each send and receive, in posting order; none in a barrier.

    Or a reduction, in which ranks wait for all others or not.
    Or a place where a transfer is put in the queue (`start`), or is waited for (`need`); the two lines share its tag.
    """

    sends: list[tuple[int, Tag]] = field(default_factory=list)
    receives: list[tuple[int, Tag]] = field(default_factory=list)
    barrier: bool = False
    reduction: int | None = None  # the bucket
    waits: bool = True
    start: tuple[int, Tag] | None = None  # the other line, tag
    need: Tag | None = None


Messages = dict[tuple[int, int], list[Tag]]  # by (source, target), in posting order


class Executor:
    """The state of all lines (called ranks here): the place of each in its program, and the messages posted so far."""

    def __init__(self, plan: StepPlan, blocking: bool = True) -> None:
        lines = [(rank, stage) for rank in range(plan.ranks) for stage in range(plan.stages)]
        self.programs = [_program(plan, rank, stage, blocking) for rank, stage in lines]
        self.at = [-1] * len(self.programs)
        self.sent: Messages = defaultdict(list)
        self.received: Messages = defaultdict(list)
        self.queues: list[list[tuple[int, Tag]]] = [[] for _ in self.programs]
        self.arrived: set[Tag] = set()
        self.entered: Counter[int] = Counter()  # ranks that have entered each reduction

    def finishes(self) -> bool:
        """True if every rank reaches its end and every message is the one that its receiver expected."""
        moving = list(range(len(self.programs)))
        while moving:
            for rank in moving:
                self._advance(rank)
            self._transfer()
            moving = [rank for rank in range(len(self.programs)) if self._complete(rank)]
        ended = all(self._group(rank) is None for rank in range(len(self.programs)))
        matched = all(self.sent[link] == self.received[link] for link in [*self.sent, *self.received])
        return ended and matched and not any(self.queues)

    def _group(self, rank: int) -> Group | None:
        program = self.programs[rank]
        return program[self.at[rank]] if self.at[rank] < len(program) else None

    def _advance(self, rank: int) -> None:
        """Go to the rank's next group and post it."""
        self.at[rank] += 1
        group = self._group(rank) or Group()
        for peer, tag in group.sends:
            self.sent[rank, peer].append(tag)
        for peer, tag in group.receives:
            self.received[peer, rank].append(tag)
        if group.reduction is not None:
            self.entered[group.reduction] += 1
        if group.start:
            self.queues[rank].append(group.start)

    def _transfer(self) -> None:
        """Complete all transfers that are first in both queues."""
        rank = 0
        while rank < len(self.queues):
            queue = self.queues[rank]
            if queue and (queue[0][0] > rank) and self.queues[queue[0][0]][:1] == [(rank, queue[0][1])]:
                self.queues[queue[0][0]].pop(0)
                self.arrived.add(queue.pop(0)[1])
                rank = 0
            else:
                rank += 1

    def _complete(self, rank: int) -> bool:
        """True if all messages of the rank's group are matched; the other side may already be further."""
        group = self._group(rank)
        if group is None:
            return False
        if group.need is not None:
            return group.need in self.arrived
        if group.reduction is not None:
            return not group.waits or self.entered[group.reduction] == len(self.programs)
        if group.barrier:
            others = [self._group(other) for other in range(len(self.programs))]
            return all(other is not None and other.barrier for other in others)
        sends = ((rank, peer) for peer, _ in group.sends)
        receives = ((peer, rank) for peer, _ in group.receives)
        return all(len(self.sent[link]) <= len(self.received[link]) for link in sends) and all(
            len(self.received[link]) <= len(self.sent[link]) for link in receives
        )


def finishes(plan: StepPlan, blocking: bool = True) -> bool:
    """Whether all ranks finish, where ranks wait in each reduction or not (`blocking`)."""
    return slices_in_order(plan) and Executor(plan, blocking).finishes()


def slices_in_order(plan: StepPlan) -> bool:
    """Whether each stage of each rank runs the slices of each sequence forward in their order, and backward in reverse.

    Every slice has a micro-batch of its own, and no micro-batch runs backward before it has run forward.
    """
    for rank in range(plan.ranks):
        micros = list(plan.of_rank(rank))
        for stage in range(plan.stages):
            forward, backward, seen = defaultdict(list), defaultdict(list), set()
            for place, direction in order_of(plan, len(micros), stage):
                if direction == "backward" and place not in seen:
                    return False
                seen.add(place)
                ran = forward if direction == "forward" else backward
                for shard in micros[place].shards:
                    ran[shard.sequence].append((len(shard.earlier), place))
            for sequence, found in forward.items():
                numbers = [number for number, _ in found]
                if numbers != sorted(numbers) or backward[sequence] != found[::-1]:
                    return False
                if any(one[1] == other[1] for one, other in pairwise(found)):
                    return False
                if plan.mode != "pipeline" and len(found) > 1:  # backward passes follow at once
                    return False
    return True


def order_of(plan: StepPlan, count: int, stage: int) -> list[tuple[int, Direction]]:
    """Return the passes of one stage over `count` micro-batches, in order."""
    if plan.mode != "pipeline":
        ways: tuple[Direction, Direction] = ("forward", "backward")
        return [(place, direction) for place in range(count) for direction in ways]
    found: list[tuple[int, Direction]] = []
    for number in plan.passes.tolist():
        place, rest = divmod(number, 2 * plan.stages)
        if rest // 2 == stage and place < count:
            found.append((place, "backward" if rest % 2 else "forward"))
    return found


def _program(plan: StepPlan, rank: int, stage: int, blocking: bool) -> list[Group]:
    """Return all groups of one stage of a rank, in order."""
    micros, line = list(plan.of_rank(rank)), rank * plan.stages + stage
    groups: list[Group] = []
    if plan.mode != "pipeline":
        for place, direction in order_of(plan, len(micros), stage):
            if plan.mode == "lockstep" and direction == "forward":
                groups.append(Group(barrier=True))
            groups += _pass(micros[place], direction, stage, plan.stages)
        return groups if plan.mode == "lockstep" else _reducing(groups, plan.overlaps(rank), micros[-1], blocking)
    for number in plan.passes.tolist():
        place, rest = divmod(number, 2 * plan.stages)
        if place >= len(micros):
            continue
        at, step = rest // 2, -1 if rest % 2 else 1
        direction: Direction = "backward" if rest % 2 else "forward"
        tag = (micros[place].index, at, direction)  # of the transfer of this pass's result
        if at == stage:
            if 0 <= at - step < plan.stages:
                groups.append(Group(need=(micros[place].index, at - step, direction)))
            groups += _pass(micros[place], direction, stage, plan.stages)
            if 0 <= at + step < plan.stages:
                groups.append(Group(start=(line + step, tag)))
        elif at + step == stage:
            groups.append(Group(start=(line - step, tag)))
    return groups


def _pass(micro: MicroBatch, direction: Direction, stage: int, stages: int) -> list[Group]:
    """Return the groups of one pass of a micro-batch."""
    layers = range(LAYERS) if direction == "forward" else reversed(range(LAYERS))
    groups = [group for layer in layers for group in _rounds(micro, layer, direction, stage, stages)]
    return groups + (_rounds(micro, LAYERS, "counts", stage, stages) if direction == "forward" else [])


def _reducing(groups: list[Group], within: bool, last: MicroBatch, blocking: bool) -> list[Group]:
    """Add the reductions of all buckets and the sum of norms to the groups of a rank: behind them, or `within` the
    last backward pass, that of micro-batch `last`."""
    found, backward = groups, []
    if within:
        in_layer = len(_rounds(last, 0, "backward", 0, 1))
        found, backward = groups[: -LAYERS * in_layer], groups[-LAYERS * in_layer :]
    for bucket in range(LAYERS):
        if within:
            found, backward = found + backward[:in_layer], backward[in_layer:]
        found = [*found, Group(reduction=bucket, waits=blocking)]
    return [*found, Group(reduction=LAYERS)]


def _rounds(micro: MicroBatch, layer: int, direction: schedule.Direction, stage: int, stages: int) -> list[Group]:
    """Return the groups of one layer. All rings of the micro-batch advance together."""
    groups = [] if direction == "counts" else [_in_teams(micro, (layer, direction, "queries"), stage, stages)]
    for hops in _hops(micro, direction, stages):
        group = Group()
        for shard in micro.shards:
            far = 1 if direction == "counts" else shard.team
            following = shard.ring[(shard.part + far) % shard.degree] * stages + stage
            previous = shard.ring[(shard.part - far) % shard.degree] * stages + stage
            for kind, round_ in hops:
                for transfer in schedule.transfers(shard.degree, shard.part, round_, direction, shard.team):
                    if transfer.kind == kind:
                        place = (micro.gang, layer, direction, round_, shard.sequence, len(shard.earlier), kind)
                        group.sends.append((following, (*place, transfer.send)))
                        group.receives.append((previous, (*place, transfer.receive)))
        groups.append(group)
    return (
        groups if direction == "counts" else [*groups, _in_teams(micro, (layer, direction, "results"), stage, stages)]
    )


def _hops(micro: MicroBatch, direction: schedule.Direction, stages: int) -> list[list[tuple[schedule.Kind, int]]]:
    """Return, hop by hop, the kinds of messages that are sent together, and in which rounds the schedule has them."""
    if direction == "counts":
        return [[("counts", round_)] for round_ in range(max((s.degree for s in micro.shards), default=0))]
    rounds = range(max((s.degree // s.team for s in micro.shards), default=0))
    most = rounds_per_call(stages)
    calls = [list(of) for _, of in groupby(rounds, lambda round_: schedule.call_of_round(round_, most))]
    found = []
    for after, before in zip([*calls[1:], [], []], [[], *calls], strict=False):
        for arrives, leaves in zip_longest(after, before if direction == "backward" else []):
            kv = [] if arrives is None else [("kv", arrives - 1)]
            found.append(kv + ([] if leaves is None else [("dkv", leaves + 1)]))
    return found


def _in_teams(micro: MicroBatch, what: Tag, stage: int, stages: int) -> Group:
    """Return the group in which the members of teams send each other queries or results."""
    group = Group()
    for shard in micro.shards:
        for mate in schedule.mates(shard.part, shard.team):
            peer, place = shard.ring[mate] * stages + stage, (micro.gang, *what, shard.sequence, len(shard.earlier))
            group.sends.append((peer, (*place, shard.part, mate)))
            group.receives.append((peer, (*place, mate, shard.part)))
    return group
