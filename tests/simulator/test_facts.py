"""Figures of a plan against counts that follow the ring schedule hop by hop."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.config.load import load
from engine.job import Job
from engine.planner.make import plan_step
from engine.planner.plan import schedule
from engine.planner.plan.step_plan import MicroBatch, StepPlan
from engine.planner.settings import PlanSettings
from engine.simulator.facts import facts, outcome, ring_bytes
from engine.simulator.timeline import simulate
from tests.presets import LLAMA7B_2M
from tests.simulator.reference import Machine
from tests.simulator.ring_bytes import rank_ring_bytes
from tests.simulator.worlds import World, worlds

CONFIG = load(["cluster.ranks_per_node=5", "context=8K", "capacity=2K"])
SETTINGS = Job(CONFIG).settings
COSTS = SETTINGS.costs
LENGTHS = np.array([1, 2, 4097, 8192, 300, 6001, 2048, 2049, 10], dtype=np.int64)


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    return plan_step(LENGTHS, Job(CONFIG).settings)


def counted_bytes(plan: StepPlan, settings: PlanSettings) -> tuple[int, int]:
    """Add up every transfer of every part in every round of every pass, inside nodes and between them.

    All messages of a part count as between nodes if its K,V, or a message to its team, leave the node.
    """
    costs, machine = settings.costs, Machine(settings)
    hop = {"kv": costs.forward_hop_bytes, "dkv": costs.backward_hop_bytes}
    again: list[schedule.Direction] = ["forward"] * (costs.forward_rings - 2)
    total = [0, 0]
    for shard in (shard for rank in range(plan.ranks) for micro in plan.of_rank(rank) for shard in micro.shards):
        leaves, own, cut = machine.leaves(shard), machine.tokens(shard), (*shard.earlier, shard.length)
        for direction in ("forward", "counts", "backward", *again):
            for round_ in range(schedule.rounds(shard.degree, direction, shard.team)):
                for transfer in schedule.transfers(shard.degree, shard.part, round_, direction, shard.team):
                    tokens = schedule.prefix_tokens(cut, shard.degree, transfer.send)
                    counts = transfer.kind == "counts"
                    total[leaves] += costs.counts_bytes if counts else tokens * hop[transfer.kind]
            if direction != "counts":
                queries = 3 if direction == "backward" else 1
                each = queries * costs.query_bytes + costs.result_bytes
                total[leaves] += (shard.team - 1) * own * each
    return total[0], total[1]


@given(worlds, st.integers(2, 3))
def test_bytes_by_link_are_those_of_the_schedule(world: World, forward_rings: int) -> None:
    plan, asked = world
    settings = replace(asked, costs=replace(asked.costs, forward_rings=forward_rings, query_bytes=5, result_bytes=7))
    assert ring_bytes(plan, settings) == counted_bytes(plan, settings)
    assert sum(rank_ring_bytes(plan, settings)) == sum(ring_bytes(plan, settings))


def test_bytes_may_exceed_int64(plan: StepPlan) -> None:
    """16,384 ranks with 2M tokens each in rings of 512 send about 1e19 bytes a step; here a few tokens do."""
    cluster = Cluster((Node("a", 2), Node("b", 3)), 2**40)
    costs = replace(COSTS, forward_rings=3, forward_hop_bytes=2**50, backward_hop_bytes=2**51)
    settings = replace(SETTINGS, cluster=cluster, costs=costs)
    assert ring_bytes(plan, settings) == counted_bytes(plan, settings)
    assert min(ring_bytes(plan, settings)) > 2**63


@given(worlds)
def test_the_outcome_of_a_step(world: World) -> None:
    """Compute, exposed transfers, the end of the step as far as it does not hide, and the bubble add up to the step."""
    plan, asked = world
    settings = replace(asked, costs=replace(asked.costs, step=31_337, reduction=20_000, last_bucket=0.25))
    line = simulate(plan, settings)
    found = outcome(plan, settings, line)
    closing = 31_337 - line.hidden
    step = (line.makespan + closing) / 1e9
    assert found["step_s"] == pytest.approx(step)
    assert found["tokens_per_s"] == pytest.approx(sum(plan.lengths.tolist()) / step)
    parts = [float(found[name]) for name in ("compute_s", "exposed_comm_s")]
    assert sum(parts) + closing / 1e9 + float(found["bubble"]) * step == pytest.approx(step, abs=1e-9)
    assert 0 <= float(found["bubble"]) < 1
    flops = 3 * sum(1000 * s + 10 * (s * (s + 1) // 2) for s in plan.sequence_lengths.tolist())
    assert found["mfu"] == pytest.approx(flops / (plan.ranks * 1e9 * step))
    if plan.mode != "pipeline":  # there others are in flight: tests/planner/proof/slow_verify.py
        assert found["peak_bytes"] == max(peak(micro, settings) for r in range(plan.ranks) for micro in plan.of_rank(r))


def peak(micro: MicroBatch, settings: PlanSettings) -> int:
    """Return the peak bytes of a rank in a micro-batch: model states, activations that stay, and buffers."""
    costs = settings.costs
    shards = [schedule.shard_tokens(s.length, s.degree, s.part) for s in micro.shards]
    largest = [max(schedule.shard_tokens(s.length, s.degree, p) for p in range(s.degree)) for s in micro.shards]
    rings = sum(size for size, s in zip(largest, micro.shards, strict=True) if s.degree > 1)
    of_four = 2 + 2 * (1 - Fraction(round(1e6 * micro.offload), 10**6))  # layers whose activations stay
    saved = costs.token_bytes * math.ceil(sum(shards) * of_four / 4)
    working = [instant.fixed + instant.token * sum(shards) for instant in costs.instants]
    return costs.fixed_bytes + saved + max(working) + costs.ring_bytes * rings


def test_facts(plan: StepPlan) -> None:
    found = facts(plan, SETTINGS)
    assert (found["ranks"], found["sequences"], found["tokens"]) == (5, 9, int(LENGTHS.sum()))
    assert float(found["lower_bound_s"]) <= float(found["makespan_s"])
    work = COSTS.seconds(int(COSTS.sequence(LENGTHS).sum())) / 5
    assert found["balance"] == pytest.approx(work / float(found["makespan_s"]))
    assert float(found["lower_bound_s"]) >= work


def test_offload_is_counted_micro_batch_by_micro_batch() -> None:
    """A model of 8 layers, so six of eight may be offloaded; then the longest, of 64K tokens, needs fewer ranks."""
    config = load([*LLAMA7B_2M, "model.layers=8", "cluster.nodes=4", "context=64K", "planner=naive"])
    settings = Job(config).settings
    lengths = np.array([65536, 4096, 300], dtype=np.int64)
    plan = plan_step(lengths, settings)
    found, costs = facts(plan, settings), settings.costs
    away = []
    for micro in (micro for rank in range(plan.ranks) for micro in plan.of_rank(rank)):
        tokens = sum(schedule.shard_tokens(s.length, s.degree, s.part) for s in micro.shards)
        away.append(tokens - math.ceil(tokens * (2 + 6 * (1 - Fraction(round(1e6 * micro.offload), 10**6))) / 8))
    assert found["host_bytes"] == costs.token_bytes * max(away) > 0
    assert found["offloaded_share"] == pytest.approx(sum(away) / int(lengths.sum()))
    assert found["least_ranks"] <= found["ring_ranks"] == found["max_degree"] < 8
    plain = settings.without_offload()
    without = facts(plan_step(lengths, plain), plain)
    assert (without["least_ranks"], without["ring_ranks"], without["host_bytes"]) == (8, 8, 0)
    assert outcome(plan, settings, simulate(plan, settings))["host_bytes"] == found["host_bytes"]
