"""The boxes of a timeline: what a plan says of each measured or simulated micro-batch. Numbers only.

Letters: M spans that are shown, R ranks that are shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.cost.model import NS
from engine.planner.durations import gang_times
from engine.planner.loads import micro_tokens
from engine.planner.plan import Ints, StepPlan
from engine.planner.settings import PlanSettings
from engine.simulator.timeline import Timeline, simulate

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

MOST_GROUPS = 6  # ring sizes that still have clearly different colours
MOST_ROWS = 64  # ranks that still have legible rows


class Span(NamedTuple):
    """When a rank ran a micro-batch, in seconds from the step's start. `micro_batch` is the plan's number of it.

    `exposed_s` of it are spent on nothing but transfers, in truth over its rounds; drawn as the last part of its box.
    """

    rank: int
    micro_batch: int
    start_s: float
    stop_s: float
    exposed_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Boxes:
    """One row a span. `degree` is its largest ring: 1 without rings, 0 when it is idle.

    `above` and `below` say whether the row before or after its own runs a micro-batch of the same gang.
    """

    all_ranks: int
    end_s: float  # of the step's last micro-batch, shown or not
    ranks: Ints  # [R] those that are shown, ascending
    row: Ints  # [M] place in `ranks`
    start_s: Floats  # [M]
    stop_s: Floats  # [M]
    exposed_s: Floats  # [M]
    degree: Ints  # [M]
    tokens: Ints  # [M]
    above: Bools  # [M]
    below: Bools  # [M]


def boxes(plan: StepPlan, spans: Sequence[Span], ranks: Ints, end_s: float | None = None) -> Boxes:
    """Return the boxes of those spans, in their order, that ran on `ranks` [R]. The spans must be of the plan.

    The step ends at `end_s`; without it all spans are there, and it ends with the last.
    """
    columns = np.array(spans, dtype=np.float64).reshape(-1, len(Span._fields)).T
    columns = columns[:, np.isin(columns[0], ranks)]
    micro = columns[1].astype(np.int64)
    row, gang = np.searchsorted(ranks, columns[0]), plan.gang[micro]
    gangs = set(zip(gang.tolist(), row.tolist(), strict=True))
    near = [[(g, r + step) in gangs for g, r in zip(gang.tolist(), row.tolist(), strict=True)] for step in (-1, 1)]
    return Boxes(
        all_ranks=plan.ranks,
        end_s=max(span.stop_s for span in spans) if end_s is None else end_s,
        ranks=ranks,
        row=row.astype(np.int64),
        start_s=columns[2],
        stop_s=columns[3],
        exposed_s=columns[4],
        degree=largest_rings(plan)[micro],
        tokens=micro_tokens(plan)[micro],
        above=np.array(near[0], dtype=np.bool_),
        below=np.array(near[1], dtype=np.bool_),
    )


def largest_rings(plan: StepPlan) -> Ints:
    """Return the largest ring of each micro-batch of the plan: 1 without rings, 0 when it is idle."""
    largest = np.zeros(plan.micro_batches, dtype=np.int64)
    np.maximum.at(largest, plan.shard_micro, plan.degrees[plan.shard_sequence])
    return largest


def simulated(plan: StepPlan, settings: PlanSettings, most: int = MOST_ROWS) -> Boxes:
    """Return the boxes of a plan as the simulator runs it, on at most so many ranks."""
    line, ranks = simulate(plan, settings), shown_ranks(plan.ranks, most)
    return boxes(plan, simulated_spans(plan, settings, line, ranks), ranks, line.makespan / NS)


def simulated_spans(plan: StepPlan, settings: PlanSettings, line: Timeline, ranks: Ints) -> list[Span]:
    """Return the spans of a simulated plan on `ranks` [R], each as long as the rank itself computes and transfers.

    What a gang's slowest member takes longer is left blank. Of a pipeline it is the first stage: each micro-batch has a
    span for its forward pass and one for its backward pass, which share compute and transfers as they share the time.
    """
    gangs = gang_times(plan, settings.costs, settings.cluster)
    chosen = np.flatnonzero(np.isin(line.rank, ranks))
    micro = line.micro_batch[chosen]
    gang = plan.gang[micro]
    exposed = gangs.exposed[gang] / plan.stages
    busy = gangs.compute[micro] / plan.stages + exposed
    idle = busy == 0
    busy[idle] = (line.stop - line.start)[chosen][idle]
    if plan.mode != "pipeline":
        return _spans(line.rank[chosen], micro, line.start[chosen], busy, exposed)
    share = gangs.forward[gang] / np.maximum(1.0, gangs.forward[gang] + gangs.backward[gang])
    backward = line.stop[chosen] - gangs.backward[gang] / plan.stages
    return [
        *_spans(line.rank[chosen], micro, line.start[chosen], share * busy, share * exposed),
        *_spans(line.rank[chosen], micro, backward, (1 - share) * busy, (1 - share) * exposed),
    ]


def _spans(rank: Ints, micro: Ints, start: Ints | Floats, busy: Floats, exposed: Floats) -> list[Span]:
    """Return spans from arrays in nanoseconds."""
    columns = (start / NS, (start + busy) / NS, exposed / NS)
    return list(map(Span, rank.tolist(), micro.tolist(), *(column.tolist() for column in columns)))


def of_plan(plan: StepPlan, spans: Sequence[Span]) -> bool:
    """Return whether the spans are those of this plan: each micro-batch once, on its rank.

    A crash between the writing of the two files leaves the plan of one step beside the trace of another.
    """
    ran = sorted((span.micro_batch, span.rank) for span in spans)
    return ran == list(enumerate(plan.micro_rank.tolist()))


def shown_ranks(ranks: int, most: int = MOST_ROWS) -> Ints:
    """Return the ranks that a timeline shows, [R]: all, or `most` of them, evenly chosen from the first to the last."""
    return np.unique(np.linspace(0, ranks - 1, min(ranks, most)).round().astype(np.int64))


def degree_groups(degree: Ints) -> list[range]:
    """Return the ring sizes above 1, in at most MOST_GROUPS ranges, each from a size that occurs to one that does."""
    sizes = np.unique(degree[degree > 1])
    if len(sizes) == 0:
        return []
    groups = np.array_split(sizes, min(MOST_GROUPS, len(sizes)))
    return [range(int(group[0]), int(group[-1]) + 1) for group in groups]


def group_name(group: range) -> str:
    """Return a range of ring sizes as the legend has it."""
    return f"ring of {group[0]}" if len(group) == 1 else f"rings of {group[0]} to {group[-1]}"
