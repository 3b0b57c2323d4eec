"""The boxes of a timeline: what a plan says of each measured micro-batch. Numbers only; `pictures` draws them.

Letters: M measured micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.planner.plan import Ints, StepPlan
from engine.planner.schedule import shard_tokens

Bools = NDArray[np.bool_]

MOST_GROUPS = 6  # ring sizes that still have clearly different colours


class Span(NamedTuple):
    """When a rank ran a micro-batch, in seconds from the step's start. `micro_batch` is the plan's number of it."""

    rank: int
    micro_batch: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, eq=False)
class Boxes:
    """One row a micro-batch. `degree` is its largest ring: 1 without rings, 0 when it is idle.

    `above` and `below` say whether the rank before or after it runs a micro-batch of the same gang.
    """

    rank: Ints  # [M]
    start_s: NDArray[np.float64]  # [M]
    stop_s: NDArray[np.float64]  # [M]
    degree: Ints  # [M]
    tokens: Ints  # [M]
    above: Bools  # [M]
    below: Bools  # [M]


def boxes(plan: StepPlan, spans: Sequence[Span]) -> Boxes:
    """Return the boxes of the spans, in their order. The spans must be `of_plan`."""
    micros = [plan.micro_batch(span.micro_batch) for span in spans]
    gangs = {(micro.gang, micro.rank) for micro in micros}
    return Boxes(
        rank=np.array([span.rank for span in spans], dtype=np.int64),
        start_s=np.array([span.start_s for span in spans], dtype=np.float64),
        stop_s=np.array([span.stop_s for span in spans], dtype=np.float64),
        degree=np.array([max((s.degree for s in m.shards), default=0) for m in micros], dtype=np.int64),
        tokens=np.array([sum(shard_tokens(s.length, s.degree, s.part) for s in m.shards) for m in micros], np.int64),
        above=np.array([(micro.gang, micro.rank - 1) in gangs for micro in micros], dtype=np.bool_),
        below=np.array([(micro.gang, micro.rank + 1) in gangs for micro in micros], dtype=np.bool_),
    )


def of_plan(plan: StepPlan, spans: Sequence[Span]) -> bool:
    """Return whether the spans are those of this plan: each micro-batch once, on its rank.

    A crash between the writing of the two files leaves the plan of one step beside the trace of another.
    """
    ran = sorted((span.micro_batch, span.rank) for span in spans)
    return ran == list(enumerate(plan.micro_rank.tolist()))


def degree_groups(degree: Ints) -> list[range]:
    """Return the ring sizes above 1, in at most MOST_GROUPS ranges, each from a size that occurs to one that does."""
    sizes = np.unique(degree[degree > 1])
    if len(sizes) == 0:
        return []
    groups = np.array_split(sizes, min(MOST_GROUPS, len(sizes)))
    return [range(int(group[0]), int(group[-1]) + 1) for group in groups]


def label_ranks(ranks: int) -> range:
    """Return the ranks whose number stands at the axis: all up to 64, then every k-th, about 20 of them."""
    every = 1
    while ranks > 64 and ranks / every > 20:
        every *= 2
    return range(0, ranks, every)


def short_tokens(tokens: int) -> str:
    """Return a number of tokens in a few letters: 640, 1.5K, 2M (K = 1024)."""
    for unit, letter in ((1024**2, "M"), (1024, "K")):
        if tokens >= unit:
            return f"{tokens / unit:.1f}".removesuffix(".0") + letter
    return str(tokens)
