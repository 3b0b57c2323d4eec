"""What a plan amounts to, in the numbers that people compare plans by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.planner import loads
from engine.planner.durations import crossing
from engine.planner.plan import StepPlan
from engine.planner.problem import problem_of
from engine.planner.settings import PlanSettings
from engine.simulator.timeline import Timeline, simulate, useful

Facts = dict[str, str | int | float]


def facts(plan: StepPlan, settings: PlanSettings) -> Facts:
    """Return the facts of a verified plan. The lower bound is that of docs/design.md; ring bytes are of all ranks.

    `least_ranks` hold the longest sequence, `ring_ranks` are the members of all rings.
    """
    makespan = simulate(plan, settings).makespan
    problem = problem_of(plan.lengths, settings)
    return {
        "planner": plan.planner,
        "ranks": plan.ranks,
        "sequences": plan.sequences,
        "tokens": int(plan.lengths.sum()),
        "micro_batches": plan.micro_batches,
        "max_degree": int(plan.degrees.max()),
        "least_ranks": int(problem.floors[0]),
        "ring_ranks": int(plan.degrees[plan.degrees > 1].sum()),
        "max_peers": max_peers(plan),
        "makespan_s": settings.costs.seconds(makespan),
        "lower_bound_s": settings.costs.seconds(problem.bound / plan.stages),
        "balance": useful(plan.lengths, settings) / makespan,
        "ring_bytes": sum(ring_bytes(plan, settings)),
        "offloaded_micro_batches": int((plan.offload > 0).sum()),
        "offloaded_share": offloaded_share(plan, settings),
        "host_bytes": host_bytes(plan, settings),
    }


def outcome(plan: StepPlan, settings: PlanSettings, timeline: Timeline) -> Facts:
    """Return what a simulated step amounts to: seconds, tokens a second, shares, bytes by link, memory.

    `compute_s` and `exposed_comm_s` are means over ranks; the bubble is the share of the step in which a rank does
    neither. MFU counts model FLOPs over the peak of all devices.
    """
    costs = settings.costs
    step = timeline.makespan + costs.step
    inside, between = ring_bytes(plan, settings)
    tokens = int(plan.lengths.sum())
    devices = plan.ranks * costs.devices
    return {
        "planner": plan.planner,
        "ranks": plan.ranks,
        "step_s": costs.seconds(step),
        "tokens_per_s": tokens / costs.seconds(step),
        "compute_s": costs.seconds(timeline.compute),
        "exposed_comm_s": costs.seconds(timeline.exposed),
        "bubble": max(0.0, 1 - (timeline.compute + timeline.exposed + costs.step) / step),
        "mfu": costs.flops(plan.lengths) / (devices * costs.peak_flops_per_s * costs.seconds(step)),
        "ring_bytes_in_nodes": inside,
        "ring_bytes_between_nodes": between,
        "peak_bytes": int(costs.peak_bytes(*loads.micro_loads(plan), plan.offload).max()),
        "host_bytes": host_bytes(plan, settings),
    }


def max_peers(plan: StepPlan) -> int:
    """Return the largest number of ranks that one rank sends to or receives from: its neighbours in all its rings."""
    return int(loads.peers(plan).max())


def host_bytes(plan: StepPlan, settings: PlanSettings) -> int:
    """Return the most bytes that a device has on the host at once: model states, and what a micro-batch offloads."""
    costs = settings.costs
    return costs.host_fixed_bytes + int(costs.host_bytes(loads.micro_tokens(plan), plan.offload).max())


def offloaded_share(plan: StepPlan, settings: PlanSettings) -> float:
    """Return which share of all saved activations goes to the host."""
    tokens = loads.micro_tokens(plan)
    return 1.0 - int(settings.costs.resident(tokens, plan.offload).sum()) / int(tokens.sum())


def ring_bytes(plan: StepPlan, settings: PlanSettings) -> tuple[int, int]:
    """Return the bytes that rings send inside nodes and between them in a step, all layers and passes (schedule.py).

    The hop to a member carries the K,V of all tokens but its own in each pass that runs the ring forward, and the dK,dV
    of all tokens. So a token's K,V makes D - 1 hops, and its dK,dV makes D. Experts' counts make D - 1 of a shard.
    """
    ring, leaves = plan.degrees[plan.shard_sequence] > 1, crossing(plan, settings.cluster) == 1
    return _sent(plan, settings, ring & ~leaves), _sent(plan, settings, ring & leaves)


def rank_ring_bytes(plan: StepPlan, settings: PlanSettings) -> list[int]:
    """Return the bytes that each rank sends in its rings in a step, all layers and passes."""
    ring = plan.degrees[plan.shard_sequence] > 1
    return [_sent(plan, settings, ring & (plan.ring_ranks == rank)) for rank in range(plan.ranks)]


def _sent(plan: StepPlan, settings: PlanSettings, hops: NDArray[np.bool_]) -> int:
    """Return the bytes of some hops, [K]: a hop is from a shard's rank to the next of its ring."""
    costs = settings.costs
    tokens = plan.lengths[plan.shard_sequence]
    others = tokens - loads.shard_loads(plan)[0][loads.next_shards(plan)]
    # Tokens are summed first: bytes of one hop, times hops, pass 2^63 at 16,384 ranks and 2M tokens.
    kv = int(others[hops].sum()) * costs.forward_rings * costs.forward_hop_bytes
    counts = int((plan.degrees[plan.shard_sequence][hops] - 1).sum()) * costs.counts_bytes
    return kv + int(tokens[hops].sum()) * costs.backward_hop_bytes + counts
