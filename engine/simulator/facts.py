"""What a plan amounts to, in the numbers that people compare plans by."""

from __future__ import annotations

from engine.cost.model import Costs
from engine.planner.loads import peers
from engine.planner.plan import StepPlan
from engine.simulator.timeline import balance, simulate


def facts(plan: StepPlan, costs: Costs) -> dict[str, str | int | float]:
    """Return the facts of a verified plan. Seconds are nominal (`cost/rates.py`) and count compute only.

    Then a sequence costs the same on every ring, and the lower bound (docs/design.md) is the mean work of a rank.
    """
    bound = int(costs.sequence(plan.lengths).sum()) / plan.ranks
    return {
        "planner": plan.planner,
        "ranks": plan.ranks,
        "sequences": plan.sequences,
        "tokens": int(plan.lengths.sum()),
        "micro_batches": plan.micro_batches,
        "max_degree": int(plan.degrees.max()),
        "max_peers": max_peers(plan),
        "makespan_s": costs.seconds(simulate(plan, costs).makespan),
        "lower_bound_s": costs.seconds(bound),
        "balance": balance(plan, costs),
        "ring_bytes": ring_bytes(plan, costs),
    }


def max_peers(plan: StepPlan) -> int:
    """Return the largest number of ranks that one rank sends to or receives from: its neighbours in all its rings."""
    return int(peers(plan).max())


def ring_bytes(plan: StepPlan, costs: Costs) -> int:
    """Return the bytes that all rings of a step send, all layers, forward and backward (`planner/schedule.py`).

    In a ring of D every token's K,V makes D - 1 hops in the forward and in the backward pass, and its dK,dV makes D.
    """
    shared = plan.degrees > 1
    tokens, degrees = plan.lengths[shared], plan.degrees[shared]
    forward, backward = 2 * int((tokens * (degrees - 1)).sum()), int((tokens * degrees).sum())
    return forward * costs.forward_hop_bytes + backward * costs.backward_hop_bytes
