"""A plan in figures: what `bytescale plan` prints."""

from __future__ import annotations

from typing import Any

from engine.cost.model import Costs
from engine.planner.loads import peers, ring_bytes
from engine.planner.plan import StepPlan
from engine.simulator.timeline import balance, lower_bound, simulate


def facts(plan: StepPlan, costs: Costs) -> dict[str, Any]:
    """Return the figures of a plan under the names of CLI.md; bytes in all, seconds nominal (cost/rates.py)."""
    return {
        "planner": plan.planner,
        "mode": plan.mode,
        "ranks": plan.ranks,
        "sequences": plan.sequences,
        "tokens": int(plan.lengths.sum()),
        "micro_batches": plan.micro_batches,
        "max_degree": int(plan.degrees.max()),
        "max_peers": int(peers(plan).max()),
        "makespan_s": costs.seconds(simulate(plan, costs).makespan),
        "lower_bound_s": costs.seconds(lower_bound(plan, costs)),
        "balance": balance(plan, costs),
        "ring_bytes": ring_bytes(plan, costs),
    }
