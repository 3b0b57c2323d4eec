"""A step as our planner reads it: sequences in descending order, their least degrees, what they cost, and the bound.

Letters: S sequences, P ranks. ns, tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engine.cost.times import Rates, wholes
from engine.planner import memory
from engine.planner.bound import Floats, bound, kinds_of
from engine.planner.plan import Ints
from engine.planner.settings import PlanSettings
from engine.planner.sky import Ranks


@dataclass(frozen=True, eq=False)
class Problem:
    """One step. `order` [S] is the place that each sequence has in the step itself."""

    order: Ints
    lengths: Ints  # [S] descending
    floors: Ints  # [S] least degrees, on the ranks that hold the most
    times: Floats  # [S] of uncut sequences, with their share of a micro-batch's fixed cost, if they pay one
    gain: Floats  # [S] how many times its capacity a rank holds of a sequence, with offload
    rates: Rates
    ranks: Ranks
    first: float  # ns of a rank's micro-batch of whole sequences, where these pay no share of one
    bound: float

    @property
    def back(self) -> Ints:
        """Return where each of the step's own sequences stands in `lengths`, [S]: the inverse of `order`."""
        back = np.empty_like(self.order)
        back[self.order] = np.arange(len(self.order))
        return back

    def work(self, after: int = 0) -> float:
        """Return the times of the sequences after the first few together, added in order: the same on every machine."""
        return float(np.cumsum(self.times[after:])[-1]) if after < len(self.times) else 0.0


def problem_of(lengths: Ints, settings: PlanSettings) -> Problem:
    """Return the problem of a step of `lengths` [S]."""
    order = np.argsort(-lengths, kind="stable")
    return _problem(order, lengths[order], settings)


def without_offload(problem: Problem, settings: PlanSettings) -> Problem:
    """Return the problem of the same step where nothing is offloaded."""
    return _problem(problem.order, problem.lengths, replace(settings, offload=0))


def _problem(order: Ints, lengths: Ints, settings: PlanSettings) -> Problem:
    rates, cluster, holds = settings.costs.rates, settings.cluster, settings.capacities
    gain, most = np.ones(len(lengths)), holds
    if settings.offload and settings.costs.layers > 2:
        gain, most = memory.gain(lengths, settings), memory.most_tokens(settings)
    node, kinds = cluster.largest_node, kinds_of(100.0 / cluster.speed)
    held = np.maximum(holds.max(), np.minimum(most.max(), (holds.max() * gain).astype(np.int64)))
    floors = -(-lengths // held)
    share = rates.micro / int(holds.max())  # as many tokens fill a micro-batch
    low = bound(rates, lengths, floors, share, 0.0, node, kinds)
    times, first = wholes(rates, lengths) + share * lengths, 0.0
    if int(lengths.sum()) < len(holds) * int(holds.max()):  # else no rank's share is less than a micro-batch
        few = bound(rates, lengths, floors, 0.0, rates.micro, node, kinds)
        if few > low:  # each rank pays for one micro-batch, or for its rings'
            low, times, share, first = few, wholes(rates, lengths), np.inf, rates.micro
    ranks = Ranks(holds, most, 100.0 / cluster.speed, node, share)
    return Problem(order, lengths, floors, times, gain, rates, ranks, first, low)


def lower_bound(lengths: Ints, settings: PlanSettings) -> float:
    """Return the lower bound of a step of `lengths` [S], ns (docs/planner.md); stages of a pipeline share the work."""
    return problem_of(lengths, settings).bound / settings.stages
