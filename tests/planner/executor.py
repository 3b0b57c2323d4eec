"""Executes a plan on simulated ranks that exchange messages as the engine does, and reports whether all ranks finish.

Each rank runs its micro-batches in order, forward and backward through every layer, and after the last layer sums the
counts of its experts. A round is one batched group of sends and receives, and ends when all of them are matched.
Between two ranks the n-th send matches the n-th receive, and only while both ranks are in their groups (rendezvous), so
no buffer hides a wrong order. If a send matches the receive of another buffer, the plan counts as not finishing. In
lockstep mode all ranks wait for each other before every micro-batch.

In a pipeline each stage of each rank is a separate line, number rank x stages + stage, and rings connect the lines of
one stage. Activations go to the next stage and gradients to the previous one: the send after a pass and the receive
before the next one are one group if they have the same neighbour, else one after the other. The line waits for each, so
it never has two transfers at once (engine/parallel/pipeline.py).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from engine.planner.plan import schedule
from engine.planner.plan.step_plan import MicroBatch, StepPlan

LAYERS = 2  # of a stage
Direction = Literal["forward", "backward"]
Tag = tuple[object, ...]


@dataclass
class Group:
    """One batched group: (peer, tag) of each send and receive, in posting order; none in a barrier."""

    sends: list[tuple[int, Tag]] = field(default_factory=list)
    receives: list[tuple[int, Tag]] = field(default_factory=list)
    barrier: bool = False


Messages = dict[tuple[int, int], list[Tag]]  # by (source, target), in posting order


class Executor:
    """The state of all lines (called ranks here): the place of each in its program, and the messages posted so far."""

    def __init__(self, plan: StepPlan, fused: bool) -> None:
        self.programs = [
            _program(plan, rank, stage, fused) for rank in range(plan.ranks) for stage in range(plan.stages)
        ]
        self.at = [-1] * len(self.programs)
        self.sent: Messages = defaultdict(list)
        self.received: Messages = defaultdict(list)

    def finishes(self) -> bool:
        """True if every rank reaches its end and every message is the one that its receiver expected."""
        moving = list(range(len(self.programs)))
        while moving:
            for rank in moving:
                self._advance(rank)
            moving = [rank for rank in range(len(self.programs)) if self._complete(rank)]
        ended = all(self._group(rank) is None for rank in range(len(self.programs)))
        return ended and all(self.sent[link] == self.received[link] for link in [*self.sent, *self.received])

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

    def _complete(self, rank: int) -> bool:
        """True if all messages of the rank's group are matched; the other side may already be further."""
        group = self._group(rank)
        if group is None:
            return False
        if group.barrier:
            others = [self._group(other) for other in range(len(self.programs))]
            return all(other is not None and other.barrier for other in others)
        sends = ((rank, peer) for peer, _ in group.sends)
        receives = ((peer, rank) for peer, _ in group.receives)
        return all(len(self.sent[link]) <= len(self.received[link]) for link in sends) and all(
            len(self.received[link]) <= len(self.sent[link]) for link in receives
        )


def finishes(plan: StepPlan, fused: bool = True) -> bool:
    """Whether all ranks finish. Without `fused`, a send and a receive are never one group in a pipeline."""
    return Executor(plan, fused).finishes()


def _program(plan: StepPlan, rank: int, stage: int, fused: bool) -> list[Group]:
    """Return all groups of one stage of a rank, in order."""
    micros = list(plan.of_rank(rank))
    order = [(micros[index], direction) for index, direction in passes(len(micros), stage, plan.stages)]
    neighbours = [_neighbours(micro, stage, plan.stages, direction) for micro, direction in order]
    groups = [Group(receives=neighbours[0][0])]
    for number, (micro, direction) in enumerate(order):
        if plan.mode == "lockstep" and direction == "forward":
            groups.append(Group(barrier=True))
        for layer in range(LAYERS) if direction == "forward" else reversed(range(LAYERS)):
            groups += _rounds(micro, layer, direction, stage, plan.stages)
        if direction == "forward":
            groups += _rounds(micro, LAYERS, "counts", stage, plan.stages)
        sends, receives = neighbours[number][1], neighbours[number + 1][0] if number + 1 < len(order) else []
        if fused and sends and receives and sends[0][0] == receives[0][0]:
            groups.append(Group(sends, receives))
        else:
            groups += [Group(sends), Group(receives=receives)]
    return groups


def passes(count: int, stage: int, stages: int) -> list[tuple[int, Direction]]:
    """Return the passes of a stage over `count` micro-batches in 1F1B order."""
    ahead = min(stages - 1 - stage, count)
    order: list[tuple[int, Direction]] = [(index, "forward") for index in range(ahead)]
    for index in range(ahead, count):
        order += [(index, "forward"), (index - ahead, "backward")]
    return order + [(index, "backward") for index in range(count - ahead, count)]


def _neighbours(
    micro: MicroBatch, stage: int, stages: int, direction: Direction
) -> tuple[list[tuple[int, Tag]], list[tuple[int, Tag]]]:
    """Return what a pass receives from the previous stage, and what it sends to the next one."""
    step = 1 if direction == "forward" else -1
    line = micro.rank * stages + stage
    before = [(line - step, (micro.index, direction))] if 0 <= stage - step < stages else []
    after = [(line + step, (micro.index, direction))] if 0 <= stage + step < stages else []
    return before, after


def _rounds(micro: MicroBatch, layer: int, direction: schedule.Direction, stage: int, stages: int) -> list[Group]:
    """Return the groups of one layer. All rings of the micro-batch advance together."""
    groups = []
    for round_ in range(max((schedule.rounds(s.degree, direction) for s in micro.shards), default=0)):
        group = Group()
        for shard in micro.shards:
            following = shard.ring[(shard.part + 1) % shard.degree] * stages + stage
            previous = shard.ring[shard.part - 1] * stages + stage
            for transfer in schedule.transfers(shard.degree, shard.part, round_, direction):
                place = (micro.gang, layer, direction, round_, shard.sequence, transfer.kind)
                group.sends.append((following, (*place, transfer.send)))
                group.receives.append((previous, (*place, transfer.receive)))
        groups.append(group)
    return groups
