"""The cost step of the adaptive planner: sequences in descending order, their costs, and the lower bound.

Letters: S sequences, P ranks. Times in ns, sizes in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from engine.compiled import njit
from engine.cost.times import Rates, unsplit_times
from engine.planner import ratios
from engine.planner.plan.rows import ascending
from engine.planner.settings import PlanSettings
from engine.planner.time.bound import bound
from engine.units import Floats, Ints


class Ranks(NamedTuple):
    """The ranks, for compiled code. Ranks of a node have consecutive numbers."""

    holds: Ints  # [P] capacity
    most: Ints  # [P] maximum tokens of a shard, with as much offload as allowed
    slow: Floats  # [P] how many times slower than full speed
    node: int  # ranks per node
    overhead_per_token: float  # ns of a micro-batch's fixed cost per token; infinite: each ring pays all of it


@dataclass(frozen=True, eq=False)
class Workload:
    """What the planner needs to know of a step: its sequences, their costs, the ranks and the lower bound.

    Arrays are in descending order of length: entry i belongs to sequence order[i] of the step.
    """

    order: Ints  # [S]
    lengths: Ints  # [S]
    least_degrees: Ints  # [S] smallest ring degree on the ranks of the largest capacity, with offload
    unsplit: Ints  # [S] ns if unsplit
    times: Floats  # [S] the same; if `first` is 0, with the sequence's part of a micro-batch's fixed cost
    gain: Floats  # [S] factor by which offload multiplies a rank's capacity for the sequence; 1 without offload
    rates: Rates
    ranks: Ranks
    first: float  # ns that a rank pays once for a micro-batch of unsplit sequences; 0 if `times` include it
    bound: float  # ns that no plan can beat

    @property
    def work(self) -> float:
        """Sum of `times`, added in order: bitwise the same on every machine."""
        return float(np.cumsum(self.times)[-1])


def workload_of(lengths: Ints, settings: PlanSettings, other: Workload | None = None) -> Workload:
    """Compute the costs and the lower bound of a step of sequences of `lengths` [S].

    `other` is the workload of the same step with other settings for offload, if it is known: what is the same in both
    is not computed again.
    """
    rates, holds, largest = settings.costs.rates, settings.capacities, settings.largest_capacity
    # The order and the unsplit times do not depend on offload.
    if other is None:
        order = ascending(-lengths)
        lengths = lengths[order]
        unsplit = unsplit_times(rates, lengths)
    else:
        order, lengths, unsplit = other.order, other.lengths, other.unsplit
    most = holds
    if settings.offload and settings.costs.layers > 2:  # two layers' activations always stay on the device
        most = settings.largest_shards
        gain = ratios.gain(lengths, settings)
        least_degrees = _degrees(lengths, gain, largest, int(most.max()))
    else:
        gain = np.ones(len(lengths))
        least_degrees = _degrees(lengths, gain, largest, largest)
    if other is not None and all(map(np.array_equal, (least_degrees, holds), (other.least_degrees, other.ranks.holds))):
        return replace(other, gain=gain, ranks=other.ranks._replace(most=most))

    # A micro-batch's fixed cost is charged to its tokens as if it were full. If the step has less than one full
    # micro-batch per rank, it is also charged once per rank. Both give lower bounds, and the larger one is used.
    node, overhead, first = settings.cluster.largest_node, rates.micro / largest, 0.0
    low = bound(rates, lengths, least_degrees, overhead, 0.0, node, settings.kinds)
    if int(lengths.sum()) < len(holds) * largest:
        once = bound(rates, lengths, least_degrees, 0.0, rates.micro, node, settings.kinds)
        if once > low:
            low, overhead, first = once, np.inf, rates.micro
    times = unsplit + (0.0 if first else overhead) * lengths
    ranks = Ranks(holds, most, settings.slow, node, overhead)
    return Workload(order, lengths, least_degrees, unsplit, times, gain, rates, ranks, first, low)


@njit
def _degrees(lengths: Ints, gain: Floats, largest: int, most: int) -> Ints:
    """The smallest degree at which each sequence fits on ranks of capacity `largest`, [S].

    With offload, a rank takes `gain` [S] times as many tokens of a sequence as its capacity, but at most `most`.
    """
    degrees = np.ones(len(lengths), np.int64)
    for at in range(len(lengths)):
        if lengths[at] > largest:
            held = max(largest, min(most, int(largest * gain[at])))
            degrees[at] = -(-lengths[at] // held)
    return degrees


def lower_bound(lengths: Ints, settings: PlanSettings) -> float:
    """Lower bound of the time of a step of `lengths` [S], in ns (docs/planner.md).

    The stages of a pipeline divide the work; the bound is that of the one with the most.
    """
    return workload_of(lengths, settings).bound * float(settings.costs.shares.max())
