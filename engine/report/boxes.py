"""The boxes of a timeline: times of measured or simulated micro-batches, and their positions in the plan.

Letters: M boxes, R ranks that the timeline shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.planner.plan.loads import micro_tokens
from engine.planner.plan.step_plan import RankPlan, StepPlan
from engine.planner.settings import PlanSettings
from engine.planner.time.durations import gang_times
from engine.simulator.timeline import Timeline, simulate
from engine.units import NS, Bools, Floats, Ints

MOST_GROUPS = 6  # ring sizes that can be distinguished by colour
MOST_ROWS = 64  # ranks; the rows of more would be illegible


class Span(NamedTuple):
    """The time that a rank spent on a micro-batch, in seconds from the start of the step.

    `micro_batch` is its index in the plan. For `exposed_s` seconds of the span the rank only waits for transfers. This
    waiting is spread over the rounds, but drawn at the end of the box. In a pipeline, forward and backward passes of a
    micro-batch on a stage are two spans if other passes run between them.
    """

    rank: int
    micro_batch: int
    start_s: float
    stop_s: float
    exposed_s: float = 0.0
    stage: int = 0


@dataclass(frozen=True, eq=False)
class Boxes:
    """The boxes of a timeline, one per span.

    Rows are those of the ranks on the first stage, then on the second one, and so on. `degree` is that of the largest
    ring of a box's micro-batch: 1 if all sequences are unsplit, 0 if idle. `above` and `below` are true where the
    previous or the next rank has a micro-batch of the same gang on the same stage.
    """

    all_ranks: int
    end_s: float  # of the step's last micro-batch, whether it is shown or not
    ranks: Ints  # [R] shown, ascending
    stages: int  # shown
    row: Ints  # [M] stage * R + index into `ranks`
    start_s: Floats  # [M]
    stop_s: Floats  # [M]
    exposed_s: Floats  # [M]
    degree: Ints  # [M]
    tokens: Ints  # [M]
    above: Bools  # [M]
    below: Bools  # [M]


def boxes(plan: StepPlan, spans: Sequence[Span], ranks: Ints, end_s: float | None = None) -> Boxes:
    """Make the boxes of a timeline from spans of `plan`, in their order; leaves out ranks that are not in `ranks` [R].

    `end_s` is the end of the step; by default that of the last span.
    """
    columns = np.array(spans, dtype=np.float64).reshape(-1, len(Span._fields)).T
    columns = columns[:, np.isin(columns[0], ranks)]
    micro = columns[1].astype(np.int64)
    rank, stage, gang = np.searchsorted(ranks, columns[0]), columns[5].astype(np.int64), plan.gang[micro]
    keys = list(zip(gang.tolist(), stage.tolist(), rank.tolist(), strict=True))
    gangs = set(keys)
    near = [[(of_gang, on, at + step) in gangs for of_gang, on, at in keys] for step in (-1, 1)]
    return Boxes(
        all_ranks=plan.ranks,
        end_s=max(span.stop_s for span in spans) if end_s is None else end_s,
        ranks=ranks,
        stages=int(stage.max(initial=0)) + 1,
        row=stage * len(ranks) + rank,
        start_s=columns[2],
        stop_s=columns[3],
        exposed_s=columns[4],
        degree=largest_rings(plan)[micro],
        tokens=micro_tokens(plan)[micro],
        above=np.array(near[0], dtype=np.bool_),
        below=np.array(near[1], dtype=np.bool_),
    )


def largest_rings(plan: StepPlan) -> Ints:
    """Degree of the largest ring of each micro-batch, [micro-batches]: 1 if all sequences are unsplit, 0 if idle."""
    largest = np.zeros(plan.micro_batches, dtype=np.int64)
    np.maximum.at(largest, plan.shard_micro, plan.degrees[plan.shard_slice])
    return largest


def simulated(plan: StepPlan, settings: PlanSettings, most: int = MOST_ROWS) -> Boxes:
    """Simulate a plan and make the boxes of its timeline, for at most `most` ranks."""
    line, ranks = simulate(plan, settings), shown_ranks(plan.ranks, most)
    return boxes(plan, simulated_spans(plan, settings, line, ranks), ranks, line.makespan / NS)


def simulated_spans(plan: StepPlan, settings: PlanSettings, line: Timeline, ranks: Ints) -> list[Span]:
    """Return the spans of a simulated plan on `ranks` [R]: each lasts while its rank computes or waits for transfers.

    The wait for slower members of the gang is not part of a span. A pipeline is represented by its first stage, with
    separate spans for the forward and the backward pass of a micro-batch, which share its compute and transfers in
    proportion to their durations. `line` is the simulated timeline of the plan.
    """
    gangs = gang_times(plan, settings.costs, settings.cluster)
    chosen = np.flatnonzero(np.isin(line.rank, ranks))
    rank, micro, start = line.rank[chosen], line.micro_batch[chosen], line.start[chosen]
    gang = plan.gang[micro]
    share = float(settings.costs.shares[0])
    exposed = gangs.exposed[gang] * share
    busy = gangs.compute[micro] * share + exposed
    idle = busy == 0
    # An idle micro-batch computes nothing but takes part in its slot. It is drawn as long as the simulator runs it.
    busy[idle] = (line.stop[chosen] - start)[idle]

    def spans(start: Ints | Floats, fraction: float | Floats) -> list[Span]:
        columns = (start / NS, (start + fraction * busy) / NS, fraction * exposed / NS)
        return list(map(Span, rank.tolist(), micro.tolist(), *(column.tolist() for column in columns)))

    if plan.mode != "pipeline":
        return spans(start, 1.0)
    forward = gangs.forward[gang] / np.maximum(1.0, gangs.forward[gang] + gangs.backward[gang])
    backward = line.stop[chosen] - gangs.backward[gang] * share
    return [*spans(start, forward), *spans(backward, 1 - forward)]


def of_plan(plan: StepPlan, spans: Sequence[Span]) -> bool:
    """Whether spans belong to a plan: they contain each micro-batch of the ranks shown once, on the right rank.

    In a pipeline each stage runs it, in one span or in two. After a crash, a run folder may have the plan of one step
    and the trace of another.
    """
    shown = set(shown_in_run(plan).tolist())
    ran = Counter((span.micro_batch, span.rank, span.stage) for span in spans if span.rank in shown)
    expected = {
        (micro, rank, stage)
        for micro, rank in enumerate(plan.micro_rank.tolist())
        if rank in shown  # older runs wrote all ranks
        for stage in range(plan.stages)
    }
    return ran.keys() == expected and max(ran.values()) <= min(2, plan.stages)


def shown_in_run(plan: RankPlan) -> Ints:
    """The ranks that the timeline of a run shows, [R], each on all of its stages."""
    return shown_ranks(plan.ranks, max(2, MOST_ROWS // plan.stages))


def shown_ranks(ranks: int, most: int = MOST_ROWS) -> Ints:
    """The ranks that a timeline shows, [R]: all, or `most` of them, evenly spaced from the first to the last."""
    return np.unique(np.linspace(0, ranks - 1, min(ranks, most)).round().astype(np.int64))


def degree_groups(degree: Ints) -> list[range]:
    """Group the ring degrees above 1 that occur in `degree` into at most MOST_GROUPS ranges, one per colour."""
    sizes = np.unique(degree[degree > 1])
    if len(sizes) == 0:
        return []
    groups = np.array_split(sizes, min(MOST_GROUPS, len(sizes)))
    return [range(int(group[0]), int(group[-1]) + 1) for group in groups]


def group_name(group: range) -> str:
    """The legend label of a range of ring degrees, such as `rings of 2 to 7`."""
    return f"ring of {group[0]}" if len(group) == 1 else f"rings of {group[0]} to {group[-1]}"
