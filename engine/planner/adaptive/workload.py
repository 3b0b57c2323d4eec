"""The cost step of the adaptive planner: sequences in descending order, their costs, and the lower bound.

Letters: S sequences, P ranks. Times in ns, sizes in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.cost.times import Rates, unsplit_times
from engine.planner import ratios
from engine.planner.settings import PlanSettings
from engine.planner.time.bound import bound, kinds_of
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
    times: Floats  # [S] ns if unsplit; if `first` is 0, with the sequence's part of a micro-batch's fixed cost
    gain: Floats  # [S] factor by which offload multiplies a rank's capacity for the sequence; 1 without offload
    rates: Rates
    ranks: Ranks
    first: float  # ns that a rank pays once for a micro-batch of unsplit sequences; 0 if `times` include it
    bound: float  # ns that no plan can beat

    @property
    def work(self) -> float:
        """Sum of `times`, added in order: bitwise the same on every machine."""
        return float(np.cumsum(self.times)[-1])


def workload_of(lengths: Ints, settings: PlanSettings) -> Workload:
    """Compute the costs and the lower bound of a step of sequences of `lengths` [S]."""
    order = np.argsort(-lengths, kind="stable")
    lengths, rates, holds = lengths[order], settings.costs.rates, settings.capacities
    gain, most = np.ones(len(lengths)), holds
    if settings.offload and settings.costs.layers > 2:  # two layers' activations always stay on the device
        gain, most = ratios.gain(lengths, settings), ratios.most_tokens(settings)
    largest = int(holds.max())
    held = np.maximum(largest, np.minimum(most.max(), (largest * gain).astype(np.int64)))
    least_degrees = -(-lengths // held)

    # A micro-batch's fixed cost is charged to its tokens as if it were full. If the step has less than one full
    # micro-batch per rank, it is also charged once per rank. Both give lower bounds, and the larger one is used.
    slow, node = 100.0 / settings.cluster.speed, settings.cluster.largest_node
    overhead, first = rates.micro / largest, 0.0
    low = bound(rates, lengths, least_degrees, overhead, 0.0, node, kinds_of(slow))
    times = unsplit_times(rates, lengths) + overhead * lengths
    if int(lengths.sum()) < len(holds) * largest:
        once = bound(rates, lengths, least_degrees, 0.0, rates.micro, node, kinds_of(slow))
        if once > low:
            low, times, overhead, first = once, unsplit_times(rates, lengths) + 0.0, np.inf, rates.micro
    ranks = Ranks(holds, most, slow, node, overhead)
    return Workload(order, lengths, least_degrees, times, gain, rates, ranks, first, low)


def lower_bound(lengths: Ints, settings: PlanSettings) -> float:
    """Lower bound of the time of a step of `lengths` [S], in ns (docs/planner.md).

    The stages of a pipeline divide the work; the bound is that of the one with the most.
    """
    return workload_of(lengths, settings).bound * float(settings.costs.shares.max())
