"""Runs a plan on imagined ranks that exchange messages as the engine's do, and tells whether all of them finish.

Each rank runs its micro-batches in order, forward and backward through every layer, and after the last layer sums its
experts' counts. A round is one batched group of
sends and receives, and ends when all of them are matched. Between two ranks the n-th send meets the n-th receive, each
only while both ranks are at it (rendezvous); no buffer hides a wrong order. A send that meets the receive of another
buffer counts as not finishing. In lockstep mode all ranks meet before every micro-batch.

In a pipeline each stage of each rank is a line of its own, rank x stages + stage, and rings connect the lines of one
stage. Activations go to the next stage and gradients to the one before: the sender posts them and goes on, and the
receiver waits for them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from engine.planner import schedule
from engine.planner.plan import MicroBatch, StepPlan

LAYERS = 2  # of a stage
Direction = Literal["forward", "backward"]
Tag = tuple[object, ...]


@dataclass
class Group:
    """One batched group: (peer, tag) of each send and receive, in posting order. A barrier has none.

    Nobody waits for a send that is `posted`.
    """

    posted: list[tuple[int, Tag]] = field(default_factory=list)
    sends: list[tuple[int, Tag]] = field(default_factory=list)
    receives: list[tuple[int, Tag]] = field(default_factory=list)
    barrier: bool = False


Messages = dict[tuple[int, int], list[Tag]]  # by (source, target), in posting order


class Executor:
    """The state of all ranks: where each one is in its program, and what has been posted so far. Ranks are lines."""

    def __init__(self, plan: StepPlan) -> None:
        self.programs = [_program(plan, rank, stage) for rank in range(plan.ranks) for stage in range(plan.stages)]
        self.at = [-1] * len(self.programs)
        self.sent: Messages = defaultdict(list)
        self.received: Messages = defaultdict(list)

    def finishes(self) -> bool:
        """Return whether every rank comes to its end and every message is the one that its receiver expected."""
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
        for peer, tag in group.posted + group.sends:
            self.sent[rank, peer].append(tag)
        for peer, tag in group.receives:
            self.received[peer, rank].append(tag)

    def _complete(self, rank: int) -> bool:
        """Return whether all messages of the rank's group have met their other side, which may be ahead."""
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


def finishes(plan: StepPlan) -> bool:
    """Return whether the plan runs to its end."""
    return Executor(plan).finishes()


def _program(plan: StepPlan, rank: int, stage: int) -> list[Group]:
    """Return all groups of one stage of a rank in its order."""
    groups = []
    micros = list(plan.of_rank(rank))
    for index, direction in passes(len(micros), stage, plan.stages):
        micro = micros[index]
        if plan.mode == "lockstep" and direction == "forward":
            groups.append(Group(barrier=True))
        before, after = _neighbours(micro, stage, plan.stages, direction)
        groups.append(Group(receives=before))
        for layer in range(LAYERS) if direction == "forward" else reversed(range(LAYERS)):
            groups += _rounds(micro, layer, direction, stage, plan.stages)
        if direction == "forward":
            groups += _rounds(micro, LAYERS, "counts", stage, plan.stages)
        groups.append(Group(posted=after))
    return groups


def passes(count: int, stage: int, stages: int) -> list[tuple[int, Direction]]:
    """Return the passes of a stage over `count` micro-batches: some forward, then one each, then the rest backward."""
    ahead = min(stages - 1 - stage, count)
    order: list[tuple[int, Direction]] = [(index, "forward") for index in range(ahead)]
    for index in range(ahead, count):
        order += [(index, "forward"), (index - ahead, "backward")]
    return order + [(index, "backward") for index in range(count - ahead, count)]


def _neighbours(
    micro: MicroBatch, stage: int, stages: int, direction: Direction
) -> tuple[list[tuple[int, Tag]], list[tuple[int, Tag]]]:
    """Return what a pass waits for from the stage before it, and what it gives to the one after it."""
    step = 1 if direction == "forward" else -1
    line = micro.rank * stages + stage
    before = [(line - step, (micro.index, direction))] if 0 <= stage - step < stages else []
    after = [(line + step, (micro.index, direction))] if 0 <= stage + step < stages else []
    return before, after


def _rounds(micro: MicroBatch, layer: int, direction: schedule.Direction, stage: int, stages: int) -> list[Group]:
    """Return the groups of one layer: all rings of the micro-batch advance together."""
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
