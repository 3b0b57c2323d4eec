"""An interpretation of ByteScale's balance scheduler for pipelines (algorithm 2, PP-Balance).

Any d_pp consecutive micro-batches should take about the same time. So sequences of different lengths run in separate
pipelines, and pipelines with cheap micro-batches run more of them. Each sequence gets the ring degree of equation 3.
Choices where the paper is not specific:

- Buckets. In the paper each bucket of lengths goes to its own pipelines. Our bucket is the content of a column of
  neighbouring ranks: long sequences, in descending order, fill one column after the other (columns.py). So the times of
  a pipeline's micro-batches fall in small steps.
- Delta. All columns have one limit, the smallest at which everything fits, found to half a percent. The bubbles of a
  pipeline, (stages - 1) times its longest micro-batch, count as work: a column with long bubbles gets less other work.
- Cost. A ring's time includes its transfers: the rings of a column are alike, so the error without them would add up.
- Short sequences come last, one by one, each to the pipeline that is done the earliest. Each rank packs its own
  best-fit into micro-batches of C tokens.
- A column that fits in a node is inside one node, if a node has enough ranks left.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from engine.planner.baselines.columns import Stack, ring_times, stacked
from engine.planner.baselines.pack import best_fit
from engine.planner.plan.emit import Placement, build
from engine.planner.plan.rings import all_folded
from engine.planner.plan.step_plan import StepPlan
from engine.planner.ratios import equation_3
from engine.planner.settings import PlanSettings
from engine.units import Ints

_PRECISION = 256  # the limit is found to one part in 256


def balanced_pp(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan a step in pipeline mode: rings in columns, short sequences on top.

    All ranks use the smallest capacity.
    """
    capacity, costs = settings.least_capacity, settings.costs
    degrees, offload = equation_3(lengths, settings)
    order = np.lexsort((-lengths, -degrees))  # with offload a longer sequence may need fewer ranks
    long, short = order[lengths[order] > capacity], order[lengths[order] <= capacity]
    prices = costs.sequence(lengths[short]) + costs.fixed * lengths[short] // capacity
    work = _Work(
        times=ring_times(costs.rates, lengths[long], degrees[long], settings.cluster.largest_node),
        degrees=degrees[long],
        prices=prices,
        full_pack=int(prices.sum()) * capacity // max(capacity, int(lengths[short].sum())),
        settings=settings,
    )
    stack = work.lowest_stack()
    first, group = np.empty_like(lengths), np.empty_like(lengths)
    first[long], group[long] = stack.first, np.arange(len(long))

    # Short sequences, each to the rank that is done the earliest.
    packs: list[list[int]] = [[] for _ in range(settings.ranks)]
    heap = [(done, rank) for rank, done in enumerate(work.height(stack).tolist())]
    heapify(heap)
    for sequence, price in zip(short.tolist(), prices.tolist(), strict=True):
        done, rank = heap[0]
        heapreplace(heap, (done + price, rank))
        packs[rank].append(sequence)
    groups = len(long)
    for rank, pack in enumerate(packs):
        first[pack] = rank
        for items in best_fit(lengths[pack].tolist(), capacity):
            group[[pack[item] for item in items]] = groups
            groups += 1

    ring_start, ring_ranks = all_folded(first, degrees)
    placed = Placement(lengths, group, ring_start, ring_ranks, offload)
    return build("balanced", "pipeline", settings.ranks, settings.capacity, placed, settings.stages)


@dataclass(frozen=True, eq=False)
class _Work:
    """A step's rings and short sequences, in the order of placement. Times are whole ns, of all stages together."""

    times: Ints  # [R] of rings
    degrees: Ints  # [R] of rings
    prices: Ints  # times of short sequences, with their part of a micro-batch's fixed cost
    full_pack: int  # time of a micro-batch full of short sequences
    settings: PlanSettings

    def height(self, stack: Stack) -> Ints:
        """Work of each rank before short sequences, with the bubbles of its pipeline, [P]."""
        return stack.load + (self.settings.stages - 1) * np.maximum(stack.longest, self.full_pack)

    def lowest_stack(self) -> Stack:
        """Stack the rings under the smallest limit, in ns, at which everything fits; found by bisection."""
        low, high = 0, 1 + (int((self.times * self.degrees).sum()) + int(self.prices.sum())) // self.settings.ranks
        best = self._stack_under(high)
        while best is None:
            low, high = high, 2 * high
            best = self._stack_under(high)
        while high - low > 1 + high // _PRECISION:
            middle = (low + high) // 2
            found = self._stack_under(middle)
            low, high, best = (middle, high, best) if found is None else (low, middle, found)
        return best

    def _stack_under(self, limit: int) -> Stack | None:
        """Stack the rings under a limit, in ns; None if they or the short sequences do not fit."""
        node_of = self.settings.cluster.node_of
        stack = stacked(self.times, self.degrees, node_of, self.settings.stages, limit)
        if len(stack.first) < len(self.times):
            return None
        left = int(np.maximum(0, limit - self.height(stack)).sum())
        return stack if left >= int(self.prices.sum()) else None
