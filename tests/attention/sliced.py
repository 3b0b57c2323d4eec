"""Sequences in slices whose passes interleave, for tests of attention and of models.

Each rank has the same micro-batches, and runs their passes in the same order, so each one is a gang:

```
 sequence A  a0 a1 a2      micro-batches  0: a0 c0 | 1: b0 | 2: a1 | 3: b1 | 4: a2 c1
 sequence B  b0 b1         one order      0 1 2 3 -3 4 -4 -1 -2 -0      (a minus marks backward passes)
 sequence C  c0 c1
```
Letters: N tokens of all sequences, T tokens of one micro-batch on one rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.layout import Layout, idle, layout
from engine.cost.times import rounds_per_call
from engine.planner.plan.order import Pass
from engine.planner.plan.step_plan import MicroBatch, Shard
from tests.attention.rings import Placed, ThreadComm, links_between


@dataclass(frozen=True)
class Interleaved:
    """Sequences, and a random placement of their slices in micro-batches and order of passes."""

    sequences: tuple[Placed, ...]
    world: int
    seed: int = 0

    @cached_property
    def micros(self) -> list[list[tuple[int, int]]]:
        """The (sequence, slice) pairs of each micro-batch. Slices of a sequence are in different ones, in order.

        Sequences with even and with odd numbers are in different micro-batches, so that passes of others come between.
        """
        draw, groups = random.Random(self.seed), list[list[list[tuple[int, int]]]]()
        for parity in (0, 1):
            own = [number for number in range(len(self.sequences)) if number % 2 == parity]
            count = max((len(self.sequences[number].cut) + 1 for number in own), default=0)
            groups.append([[] for _ in range(count)])
            for number in own:
                places = sorted(draw.sample(range(count), len(self.sequences[number].cut)))
                for slice_, place in enumerate(places):
                    groups[parity][place].append((number, slice_))
        groups = [[micro for micro in group if micro] for group in groups]
        turns = [parity for parity, group in enumerate(groups) for _ in group]
        draw.shuffle(turns)
        return [groups[parity].pop(0) for parity in turns]

    @cached_property
    def order(self) -> list[Pass]:
        """Passes: a micro-batch runs backward once all slices of its sequences ran forward, and the later ones back."""
        draw, forward, done = random.Random(self.seed + 1), 0, set[int]()
        order: list[Pass] = []
        while len(done) < len(self.micros):
            ready = [Pass(place, False) for place in range(forward) if place not in done and self._free(place, done)]
            ready = [one for one in ready if self._last_forward(one.place) < forward]
            if forward < len(self.micros):
                ready.append(Pass(forward, True))
            order.append(draw.choice(ready))
            if order[-1].forward:
                forward += 1
            else:
                done.add(order[-1].place)
        return order

    def _sharing(self, place: int) -> list[int]:
        """Return the micro-batches that have slices of the same sequences."""
        own = {sequence for sequence, _ in self.micros[place]}
        return [at for at, micro in enumerate(self.micros) if own & {sequence for sequence, _ in micro}]

    def _last_forward(self, place: int) -> int:
        return max(self._sharing(place))

    def _free(self, place: int, done: set[int]) -> bool:
        return all(at <= place or at in done for at in self._sharing(place))

    @property
    def tokens(self) -> int:
        return sum(one.length for one in self.sequences)

    @cached_property
    def positions(self) -> Tensor:
        """Positions of all tokens in their sequences, [N]."""
        return torch.cat([torch.arange(one.length) for one in self.sequences])

    def micro_batch(self, rank: int, place: int) -> MicroBatch:
        shards = []
        for number, at in self.micros[place]:
            one = self.sequences[number]
            if rank in one.ring:
                earlier, later = one.cut[:at], sum(one.cut[at + 1 :])
                shards.append(Shard(number, one.cut[at], one.ring, one.ring.index(rank), earlier, later, one.team))
        return MicroBatch(index=place, rank=rank, gang=place, slot=-1, shards=tuple(shards))

    def layout(self, rank: int, place: int) -> Layout:
        micro = self.micro_batch(rank, place)
        return layout(micro, rounds_per_call(stages=2)) if micro.shards else idle(0)

    def rows(self, rank: int, place: int) -> Tensor:
        """Return which of the N tokens a micro-batch of a rank has, in its order, [T]."""
        rows, starts = [np.zeros(0, dtype=np.int64)], np.cumsum([0, *(one.length for one in self.sequences)])
        for number, at in self.micros[place]:
            one = self.sequences[number]
            if rank in one.ring:
                begin, part = int(starts[number]) + sum(one.cut[:at]), one.ring.index(rank)
                chunks = np.array_split(np.arange(begin, begin + one.cut[at]), 2 * len(one.ring))
                rows += [chunks[part], chunks[-1 - part]]
        return torch.from_numpy(np.concatenate(rows))

    def on_ranks(self, run: Callable[[int, ThreadComm], Any]) -> list[Any]:
        """Call `run(rank, comm)` for each rank, in a thread of its own; return the results."""
        links = links_between(self.world)
        with ThreadPoolExecutor(self.world) as pool:
            return [one.result() for one in [pool.submit(run, r, ThreadComm(r, links)) for r in range(self.world)]]


def cut(length: int, slices: int) -> tuple[int, ...]:
    """Return the lengths of slices of a sequence: unequal ones, the first the longest."""
    weights = np.linspace(2, 1, slices)
    sizes = np.maximum(1, (length * weights / weights.sum()).astype(int))
    sizes[0] += length - sizes.sum()
    return tuple(sizes.tolist())


def mixed(slices: int, degree: int, seed: int = 0) -> Interleaved:
    """Return sequences on rings of up to `degree` ranks: two in slices, one in very short slices, and whole ones."""
    ring = tuple(range(degree))
    short = (1, *[2] * (slices - 1))
    sequences = (
        Placed(29, ring, cut(29, slices)),
        Placed(11, ring),
        Placed(17, ring[::-1][: max(1, degree - 1)], cut(17, max(1, slices - 1))),
        Placed(sum(short), ring[::-1], short),  # slices are shorter than 2D: some shards are empty
        Placed(5, (degree - 1,)),
        Placed(9, (0,), cut(9, min(slices, 3))),
    )
    return Interleaved(sequences, degree, seed)
