"""The paper's balance scheduler in its form for pipelines (ByteScale, algorithm 2, PP-Balance).

Any d_pp consecutive micro-batches should take alike time, so levels of length are kept in separate pipelines, and those
of cheap micro-batches run more of them. Each sequence gets the ranks of equation 3. What the paper leaves unsaid, and
what we chose:

- Buckets are fed in turn, so that each goes to pipelines of its own. Ours is what a column of neighbouring ranks takes:
  long sequences, in descending order, fill one column after the other (columns.py). So the times of a pipeline's
  micro-batches fall, in small steps.
- Delta. All columns have one limit, the least under which everything finds room, to half a percent. A pipeline's
  bubbles, n - 1 times its longest micro-batch, count as work: a level that makes long bubbles gets less besides.
- Cost. A ring counts with its transfers: those of a column are alike, so what is left out would add up there.
- Short sequences come last, one by one to the pipeline that is done the earliest; each rank's are packed best-fit into
  micro-batches of C tokens.
- A column that fits a node lies inside one, where there is room.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from engine.planner.columns import Stack, ring_times, stacked
from engine.planner.emit import Placement, build
from engine.planner.memory import equation_3
from engine.planner.pack import best_fit
from engine.planner.plan import Ints, StepPlan
from engine.planner.rings import all_folded
from engine.planner.settings import PlanSettings

_NEAR = 256  # the limit is found to one part in so many


def balanced_pp(lengths: Ints, settings: PlanSettings) -> StepPlan:
    """Plan a step of a pipeline: rings in columns, short sequences on top.

    As all published planners it knows one capacity: that of the rank that holds the least.
    """
    capacity, ranks = settings.least_capacity, settings.ranks
    degrees, offload = equation_3(lengths, settings)
    order = np.lexsort((-lengths, -degrees))  # with offload a longer sequence may need fewer ranks
    long, short = order[lengths[order] > capacity], order[lengths[order] <= capacity]
    work = _Work.of(lengths, degrees, long, short, settings)
    stack = work.lowest()

    first, group = np.empty_like(lengths), np.empty_like(lengths)
    first[long], group[long] = stack.first, np.arange(len(long))
    groups = len(long)
    for rank, share in enumerate(_dealt(work.prices.tolist(), work.height(stack).tolist())):
        first[short[share]] = rank
        for items in best_fit(lengths[short[share]].tolist(), capacity):
            group[short[share][items]] = groups
            groups += 1
    ring_start, ring_ranks = all_folded(first, degrees)
    placed = Placement(lengths, group, ring_start, ring_ranks, offload)
    return build("balanced", "pipeline", ranks, settings.capacity, placed, settings.stages)


@dataclass(frozen=True, eq=False)
class _Work:
    """A step's rings and short sequences. Times are whole ns, of all stages together."""

    times: Ints  # of rings
    degrees: Ints  # of rings
    prices: Ints  # of short sequences, with their part of a micro-batch's fixed cost
    pack: int  # a micro-batch full of short sequences
    settings: PlanSettings

    @classmethod
    def of(cls, lengths: Ints, degrees: Ints, long: Ints, short: Ints, settings: PlanSettings) -> _Work:
        """Return the work of a step whose long and short sequences are given by number, in the order of placing."""
        costs, capacity = settings.costs, settings.least_capacity
        node = settings.cluster.largest_node
        times = ring_times(costs.rates, lengths[long], degrees[long], node)
        prices = costs.sequence(lengths[short]) + costs.fixed * lengths[short] // capacity
        pack = int(prices.sum()) * capacity // max(capacity, int(lengths[short].sum()))
        return cls(times, degrees[long], prices, pack, settings)

    def height(self, stack: Stack) -> Ints:
        """Return what each rank has to do before short sequences, the bubbles of its pipeline included, [P]."""
        return stack.load + (self.settings.stages - 1) * np.maximum(stack.longest, self.pack)

    def lowest(self) -> Stack:
        """Return the rings in columns of the least limit, by bisection."""
        low, high = 0, 1 + (int((self.times * self.degrees).sum()) + int(self.prices.sum())) // self.settings.ranks
        best = self._under(high)
        while best is None:
            low, high = high, 2 * high
            best = self._under(high)
        while high - low > 1 + high // _NEAR:
            middle = (low + high) // 2
            found = self._under(middle)
            low, high, best = (middle, high, best) if found is None else (low, middle, found)
        return best

    def _under(self, limit: int) -> Stack | None:
        """Return the rings in columns, or None where something finds no room."""
        node_of = self.settings.cluster.node_of
        stack = stacked(self.times, self.degrees, node_of, self.settings.stages, limit)
        if len(stack.first) < len(self.times):
            return None
        room = int(np.maximum(0, limit - self.height(stack)).sum())
        return stack if room >= int(self.prices.sum()) else None


def _dealt(prices: list[int], height: list[int]) -> list[list[int]]:
    """Return the sequences of each rank, by their places in `prices`: each goes to the rank that is done first."""
    shares: list[list[int]] = [[] for _ in height]
    heap = [(done, rank) for rank, done in enumerate(height)]
    heapify(heap)
    for item, price in enumerate(prices):
        done, rank = heap[0]
        heapreplace(heap, (done + price, rank))
        shares[rank].append(item)
    return shares
