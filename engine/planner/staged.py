"""From slots to stages: the order of slots is the order of a pipeline's micro-batches.

Ranks do not meet in slots any more, and those behind a rank's last work are dropped, so ranks may have unequal counts.
A gang keeps its place on all of its ranks, the same on each: so in 1F1B order every stage meets gangs in one order, and
nothing waits in a circle (planner/order.py, `_moments`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.planner.plan import StepPlan


def staged(plan: StepPlan, stages: int) -> StepPlan:
    """Return a plan in slots as one for a pipeline of `stages`."""
    busy = np.diff(plan.shard_start) > 0
    last = np.zeros(plan.ranks, dtype=np.int64)
    np.maximum.at(last, plan.micro_rank[busy], plan.slot[busy])
    kept = plan.slot <= last[plan.micro_rank]
    return replace(
        plan,
        mode="pipeline",
        stages=stages,
        micro_start=np.concatenate([[0], np.cumsum(last + 1)]),
        shard_start=np.concatenate([[0], plan.shard_start[1:][kept]]),
        gang=np.unique(plan.gang[kept], return_inverse=True)[1],
        slot=np.full(int(kept.sum()), -1, dtype=np.int64),
        offload=plan.offload[kept],
    )
