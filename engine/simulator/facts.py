"""Facts of a plan and of its simulated step, as shown to users: time, balance, bytes, memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.planner.adaptive.workload import workload_of
from engine.planner.plan import loads
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.planner.time.durations import crossing
from engine.simulator.timeline import Timeline, simulate, useful

Facts = dict[str, str | int | float]


def facts(plan: StepPlan, settings: PlanSettings) -> Facts:
    """Return the facts of a verified plan.

    `lower_bound_s` is the lower bound of docs/planner.md, and `least_ranks` the smallest ring degree at which the
    longest sequence fits, with offload if it is on. `slices` counts a sequence that is not cut once. `ring_ranks` is
    the sum of the degrees of all rings of two ranks or more, and `ring_bytes` the bytes that all ranks send in rings.
    `largest_micro_batch` is in tokens.
    """
    makespan = simulate(plan, settings).makespan
    workload = workload_of(plan.sequence_lengths, settings)
    tokens = int(plan.lengths.sum())
    micros = loads.micro_tokens(plan)
    stages = [(stage.layers, int(stage.resident_here(micros, plan.offload).sum())) for stage in settings.costs.stages]
    # Tokens whose activations are not offloaded, on average over layers.
    stay = sum(layers * held for layers, held in stages) / sum(layers for layers, _ in stages)
    return {
        "planner": plan.planner,
        "ranks": plan.ranks,
        "sequences": plan.sequences,
        "slices": plan.slices,
        "tokens": tokens,
        "micro_batches": plan.micro_batches,
        "largest_micro_batch": int(micros.max()),
        "max_degree": int(plan.degrees.max()),
        "least_ranks": int(workload.least_degrees[0]),
        "ring_ranks": int(plan.degrees[plan.degrees > 1].sum()),
        "max_team": int(plan.team.max()),
        "max_peers": int(loads.peers(plan).max()),
        "makespan_s": settings.costs.seconds(makespan),
        "lower_bound_s": settings.costs.seconds(workload.bound * float(settings.costs.shares.max())),
        "balance": useful(plan.sequence_lengths, settings) / makespan,
        "ring_bytes": sum(ring_bytes(plan, settings)),
        "offloaded_micro_batches": int((plan.offload > 0).sum()),
        "offloaded_share": 1.0 - stay / tokens,
        "host_bytes": host_bytes(plan, settings),
    }


def outcome(plan: StepPlan, settings: PlanSettings, timeline: Timeline) -> Facts:
    """Return the facts of a simulated step: time, throughput, ring bytes by link, memory.

    `compute_s` and `exposed_comm_s` are means over ranks and their stages; `bubble` is the mean fraction of the step
    during which a rank is idle: it waits for other ranks or pipeline stages, or for weights that ZeRO-3 gathers. `mfu`
    is the model FLOPs of the step divided by those of all devices at their peak rate. `balance` and
    `largest_micro_batch` are those of `facts`.
    """
    costs = settings.costs
    step = timeline.step_ns(costs)
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
        "bubble": max(0.0, (timeline.makespan - timeline.compute - timeline.exposed) / step),
        "balance": useful(plan.sequence_lengths, settings) / timeline.makespan,
        "mfu": costs.flops(plan.sequence_lengths) / (devices * costs.peak_flops_per_s * costs.seconds(step)),
        "ring_bytes_in_nodes": inside,
        "ring_bytes_between_nodes": between,
        "largest_micro_batch": int(loads.micro_tokens(plan).max()),
        "peak_bytes": int(loads.peak_bytes(plan, costs).max()),
        "host_bytes": host_bytes(plan, settings),
    }


def host_bytes(plan: StepPlan, settings: PlanSettings) -> int:
    """Return the most bytes that a rank keeps on the host at once: model states and offloaded activations."""
    costs = settings.costs
    away = costs.host_bytes(loads.micro_tokens(plan), plan.offload)
    if plan.mode == "pipeline":
        away = loads.host_bytes(plan, costs, loads.in_flight(plan, costs))
    return costs.host_fixed_bytes + int(away.max())


def ring_bytes(plan: StepPlan, settings: PlanSettings) -> tuple[int, int]:
    """Return the bytes that all rings send in a step, all layers and passes: (inside nodes, between nodes).

    In a ring of degree D, the K,V of a token make D - 1 hops in each pass that runs the ring forward, its dK,dV make D
    hops, and the expert counts of a shard make D - 1. So each member receives the K,V of all tokens except its own, and
    the dK,dV of all tokens. Teams make fewer hops, and exchange queries and results (planner/plan/schedule.py).
    """
    ring, leaves = plan.degrees[plan.shard_slice] > 1, crossing(plan, settings.cluster) == 1
    return _sent(plan, settings, ring & ~leaves), _sent(plan, settings, ring & leaves)


def _sent(plan: StepPlan, settings: PlanSettings, hops: NDArray[np.bool_]) -> int:
    """Return the bytes that the ranks of the selected shards, [K], send to the next ones and to their team."""
    costs = settings.costs
    team, passing = plan.team[plan.shard_slice], loads.passing_tokens(plan)
    # The K,V of all parts pass through a rank, but the next rank needs none of its own.
    others = passing - loads.carried_tokens(plan)[plan.next_shard]
    # Tokens are summed before they become Python integers: bytes exceed 2^63 at 16,384 ranks and 2M tokens.
    kv = int(others[hops].sum()) * costs.forward_rings * costs.forward_hop_bytes
    counts = int((plan.degrees[plan.shard_slice][hops] - 1).sum()) * costs.counts_bytes
    dkv = int(passing[hops & (plan.degrees[plan.shard_slice] > team)].sum()) * costs.backward_hop_bytes
    shared = int(((team - 1) * loads.shard_tokens(plan))[hops].sum())
    forward = costs.query_bytes + costs.result_bytes  # of each forward pass; a backward pass sends three queries
    return kv + dkv + counts + shared * (costs.forward_rings * forward + 2 * costs.query_bytes)
