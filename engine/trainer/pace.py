"""Measures how fast a rank computes, so that the launcher can name a slow one (engine/launch/stragglers.py)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

import numpy as np

from engine.cost.model import Costs
from engine.planner.plan.step_plan import RankPlan, Shard
from engine.trainer.step import StepTimes

STEPS = 20  # the median of so many steps is reported: a single slow step, which compiles kernels, does not matter


class Pace:
    """How many times longer the work of this rank takes than the costs say for a device of full speed.

    The speeds of hosts that a plan knows are left out here; the launcher takes them into account. Only micro-batches
    without rings count: in a ring, all members take as long as the slowest. In lockstep mode ranks also wait for each
    other in micro-batches, so a slow rank cannot be distinguished from the others there.
    """

    def __init__(self, costs: Costs, share: float = 1.0) -> None:
        """`share` is the part of a micro-batch's work that the rank's stage does."""
        self._costs, self._share = costs, share
        self._recent = deque[float](maxlen=STEPS)

    def of_steps(self, plan: RankPlan, times: StepTimes) -> float | None:
        """Add a step, and return the pace of the last steps; None until there are enough. Waits for the device."""
        measured, planned, counted = 0.0, 0.0, set[int]()  # ns, ns, micro-batches
        for number, start, end in times.spans():
            shards = plan.micro_batch(number).shards
            if shards and all(shard.degree == 1 for shard in shards):
                measured += (end - start) * 1e9
                if number not in counted:  # in a pipeline the forward and the backward pass have a span each
                    counted.add(number)
                    planned += self._costs.rates.micro + self._work(shards)
        if planned:
            self._recent.append(measured / (planned * self._share))
        return median(self._recent) if len(self._recent) == STEPS else None

    def _work(self, shards: Sequence[Shard]) -> int:
        """Return the planned time of shards without rings, in ns. A slice also attends to the earlier ones."""
        before = np.array([sum(shard.earlier) for shard in shards])
        until = before + [shard.length for shard in shards]
        # The cost of no token is the fixed cost of a sequence, which the difference does not contain.
        times = self._costs.sequence(until) - self._costs.sequence(before) + self._costs.sequence(0 * before)
        return int(times.sum())
