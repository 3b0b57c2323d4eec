"""Settings, lengths and hand-made plans that the planner's tests share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.cost.activations import Instant
from engine.cost.flops import WHOLE, Attention
from engine.cost.model import Costs
from engine.cost.times import Rates
from engine.planner.plan.gangs import components
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.units import Ints

COSTS = Costs(
    source="by hand",
    parameters=1_000_000,
    layers=4,
    linear_flops=1000,
    attention=(Attention(WHOLE, 10),),
    peak_flops_per_s=1e9,
    devices=1,
    rates=Rates(
        token_f=300.0,
        token_b=700.0,
        pair_f=0.5,
        pair_b=0.5,
        micro=10_000.0,
        sequence=0.0,
        round=0.0,
        ring=0.0,
        merge=0.0,
        latency=0.0,
        kv=0.0,
        dkv=0.0,
        inter_node_slowdown=1.0,
        overlap=1.0,
        recompute_factor=0.0,
        copy=10.0,
    ),
    nics=1.0,
    slot=0,
    gathers=(0, 0),
    step=0,
    token_bytes=100,
    instants=(Instant(0, 10), Instant(40, 6)),
    ring_bytes=5,
    fixed_bytes=1000,
    forward_hop_bytes=8,
    backward_hop_bytes=16,
    forward_rings=2,
    counts_bytes=24,
)
# All different, and compute and transfers take about equally long in rings of these sizes.
RATES = Rates(
    token_f=301.7,
    token_b=733.1,
    pair_f=41.3,
    pair_b=97.9,
    micro=10_007.3,
    sequence=113.9,
    round=59.3,
    ring=17.9,
    merge=3.7,
    latency=211.1,
    kv=143.3,
    dkv=277.7,
    inter_node_slowdown=5.3,
    overlap=0.6,
    recompute_factor=0.0,
    copy=1500.7,
    query=571.9,
    result=1097.3,
)
LINKED_COSTS = replace(COSTS, rates=RATES, slot=997, gathers=(40_000, 70_000))  # with rings that wait for transfers
PRIMES = (2, 3, 5, 7, 11, 13, 31, 61, 127, 251)


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def settings(
    planner: str = "balanced",
    ranks: int = 4,
    capacity: int = 16,
    mode: str = "free",
    context: int | None = None,
    max_peers: int = 4,
    device_memory: int = 2**40,
    stages: int = 1,
) -> PlanSettings:
    """Make settings. The context defaults to what all ranks hold together."""
    return PlanSettings(
        planner=planner,
        mode=mode,
        stages=stages,
        cluster=Cluster((Node("localhost", ranks),), device_memory),
        capacity=capacity,
        context=context or ranks * capacity,
        max_peers=max_peers,
        offload=0,
        host_memory=0,
        costs=staged_costs(stages),
    )


def staged_costs(stages: int, costs: Costs = COSTS) -> Costs:
    """Make the costs of a pipeline: stage p holds stages - p micro-batches at once in 1F1B order."""
    bytes_ = costs.token_bytes
    costs = replace(costs, work_shares=(1 / stages,) * stages)
    first, *later = (replace(costs, in_flight=count, token_bytes=count * bytes_) for count in range(stages, 0, -1))
    return replace(first, later_stages=tuple(later))


def device(tokens: int, offload: int = 0) -> int:
    """Return the memory of a device that holds exactly `tokens` in one micro-batch, all in rings."""
    return int(COSTS.peak_bytes(ints(tokens), ints(tokens), offload)[0])


def lengths(longest: int, most: int = 40) -> st.SearchStrategy[list[int]]:
    """Draw lists of lengths up to `longest`: random ones, short ones, primes, and the longest itself."""
    primes = [prime for prime in PRIMES if prime <= longest] or [1]
    one = st.one_of(st.integers(1, longest), st.integers(1, min(3, longest)), st.sampled_from(primes), st.just(longest))
    return st.lists(one, min_size=1, max_size=most)


def by_hand(
    lengths: list[int], rings: list[tuple[int, ...]], micros: list[list[list[int]]], capacity: int = 16
) -> StepPlan:
    """Make the plan, valid or not, in which micros[r] lists the micro-batches of rank r, each a list of sequences.

    A micro-batch holds its rank's shard of each of its sequences. Gangs are what rings connect, numbered by their first
    micro-batch.
    """
    ring_start = np.cumsum([0, *map(len, rings)])
    flat = [(rank, micro) for rank, row in enumerate(micros) for micro in row]
    shards = [[int(ring_start[s]) + rings[s].index(rank) for s in micro] for rank, micro in flat]
    shard_order = np.array([shard for row in shards for shard in row], dtype=np.int64)
    shard_micro = np.empty_like(shard_order)
    shard_micro[shard_order] = np.repeat(np.arange(len(flat)), [len(row) for row in shards])
    label = components(shard_micro, ring_start, len(flat))
    return StepPlan(
        planner="by hand",
        mode="free",
        stages=1,
        ranks=len(micros),
        capacity=capacity,
        lengths=ints(*lengths),
        before=np.zeros(len(lengths), dtype=np.int64),
        team=np.ones(len(lengths), dtype=np.int64),
        ring_start=ring_start,
        ring_ranks=np.array([rank for ring in rings for rank in ring], dtype=np.int64),
        micro_start=np.cumsum([0, *map(len, micros)]),
        shard_start=np.cumsum([0, *map(len, shards)]),
        shard_order=shard_order,
        gang=np.unique(label, return_inverse=True)[1],
        slot=np.full(len(flat), -1, dtype=np.int64),
        offload=np.zeros(len(flat), dtype=np.int64),
        overlap=np.zeros(len(micros), dtype=np.int64),
        passes=ints(),
    )
