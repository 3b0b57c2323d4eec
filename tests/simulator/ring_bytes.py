"""The bytes of rings by rank, for comparison with what ranks send. `ring_bytes` has their sum."""

from __future__ import annotations

from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.simulator.facts import _sent


def rank_ring_bytes(plan: StepPlan, settings: PlanSettings) -> list[int]:
    """Return the bytes that each rank sends in its rings in a step, all layers and passes."""
    ring = plan.degrees[plan.shard_slice] > 1
    return [_sent(plan, settings, ring & (plan.ring_ranks == rank)) for rank in range(plan.ranks)]
