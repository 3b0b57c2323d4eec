"""Whether this machine has the memory that its ranks will ask of it as a host: looked at before any of them starts."""

from __future__ import annotations

from collections.abc import Iterable

from engine.cluster.cluster import Cluster
from engine.cluster.free import free_bytes
from engine.config.schema import Config
from engine.config.units import counted, format_apart, format_bytes
from engine.cost.model import Costs
from engine.errors import Problem
from engine.launch.commands import is_local
from engine.planner.estimate import most_on_host
from engine.planner.loads import micro_tokens
from engine.planner.plan import StepPlan
from engine.planner.settings import PlanSettings


def host_problem(plans: Iterable[StepPlan], config: Config, cluster: Cluster) -> Problem | None:
    """Return the refusal of plans that, with the model states, put more on this host than is free here.

    Other hosts cannot be asked from here: a rank there that gets too little stops before its step.
    """
    ranks, free = _ranks_here(cluster), free_bytes()
    if free is None or not ranks:
        return None
    costs = Costs.of(config)
    a_rank = costs.host_fixed_bytes + max((_waiting(plan, costs) for plan in plans), default=0)
    if a_rank * ranks <= free:
        return None
    needs, has = format_apart(a_rank * ranks, free)
    message = (
        f"{format_bytes(a_rank)} a rank would wait on the host, {needs} for {counted(ranks, 'rank')}, "
        f"and {has} of this machine's memory are free"
    )
    if costs.host_fixed_bytes * ranks <= free:
        return Problem(message, "offload.ratio", "a smaller offload.ratio, or a smaller capacity or context")
    waiting = {"zero.weights_on_host": config.zero.weights_on_host, "optimizer.on_host": config.optimizer.on_host}
    keys = [key for key, waits in waiting.items() if waits]
    back = " or ".join(f"{key}=false" for key in keys)
    if len(cluster.nodes) > 1:
        return Problem(message, "cluster.ranks_per_node", f"more machines, or {back}")
    hint = f"{back}, or end what else holds memory here, or share the states with more machines: --hostfile FILE"
    return Problem(message, keys[0], hint)


def tight(config: Config, cluster: Cluster) -> str | None:
    """Return what there is to say where a later step may put more on this host than is free now; None where not."""
    most, ranks, free = most_on_host(config, PlanSettings.of(config)), _ranks_here(cluster), free_bytes()
    if free is None or not ranks or most * ranks <= free:
        return None
    return (
        f"a step may put {format_bytes(most)} a rank on the host, and {format_bytes(free)} of this machine's "
        f"memory are free for {counted(ranks, 'rank')}: plans keep to cluster.host_memory"
    )


def _ranks_here(cluster: Cluster) -> int:
    return sum(node.slots for node in cluster.nodes if is_local(node.host))


def _waiting(plan: StepPlan, costs: Costs) -> int:
    return int(costs.host_bytes(micro_tokens(plan), plan.offload).max())
