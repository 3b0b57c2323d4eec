from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.config.load import load
from engine.data.lengths import step_lengths
from engine.data.mixes import draw_documents
from engine.job import Job
from engine.planner import ratios
from engine.planner.adaptive.adaptive import adaptive
from engine.planner.adaptive.workload import lower_bound
from engine.planner.make import plan_step
from engine.planner.plan.loads import micro_tokens
from engine.planner.plan.modes import lockstep
from engine.planner.plan.step_plan import StepPlan
from engine.planner.planners import PLANNERS
from engine.planner.proof.verify import verify
from engine.planner.settings import PlanSettings
from engine.planner.time.makespan import makespan
from engine.simulator.timeline import balance, simulate
from tests.planner.executor import finishes
from tests.planner.samples import COSTS, device, ints, lengths, settings
from tests.presets import LLAMA3_8B_256K, LLAMA7B_256K

FITTED = ratios.fitted
H200 = [*LLAMA7B_256K, "cluster=h200x8", "cluster.nodes=8"]


def h200(*more: str) -> PlanSettings:
    return Job(load([*H200, "batch_tokens=8M", *more])).settings


def steps(mix: str, seed: int) -> np.ndarray:
    config = load([*H200, f"lengths={mix}", "lengths.max=256K"])
    return draw_documents(config.lengths, 4 * 1024**2, seed)


@pytest.mark.parametrize("mix", ["github", "byted", "lognormal"])
@pytest.mark.parametrize("seed", range(2))
def test_it_is_near_the_bound_and_faster_than_the_others(mix: str, seed: int) -> None:
    ours = h200("planner=adaptive")
    step = steps(mix, seed)
    taken = {name: simulate(plan_step(step, ours.by(name)), ours).makespan for name in PLANNERS}
    assert taken["adaptive"] == min(taken.values())
    assert taken["adaptive"] <= 1.05 * lower_bound(step, ours)


@pytest.mark.parametrize("mix", ["github", "byted", "lognormal"])
def test_compute_only_ranks_are_even(mix: str) -> None:
    zero = dict.fromkeys(("kv", "dkv", "latency", "round", "ring", "merge", "micro", "sequence"), 0.0)
    ours = h200("offload.ratio=0")
    plain = replace(ours, costs=replace(ours.costs, rates=ours.costs.rates._replace(**zero)))
    plan = plan_step(steps(mix, 0), plain)
    assert balance(plan, plain) >= 0.99


def test_rings_that_fit_a_node_stay_in_it() -> None:
    ours = h200()
    plan = plan_step(steps("byted", 0), ours)
    assert ((plan.degrees > 1) & (plan.degrees <= 8)).any()
    for sequence in np.flatnonzero((plan.degrees > 1) & (plan.degrees <= 8)).tolist():
        assert len({rank // 8 for rank in plan.ring(sequence)}) == 1


def test_offload_is_taken_only_where_it_shortens_the_step() -> None:
    """Slow links favour few ranks, and a sequence only fits them with offload."""
    rates = COSTS.rates._replace(kv=20.0, dkv=40.0, copy=1.0)
    slow = replace(settings("adaptive", 8, 16), offload=1_000_000, host_memory=2**40)
    slow = replace(slow, costs=replace(COSTS, layers=32, rates=rates))
    plan = plan_step(ints(100, *[16] * 40), slow)
    assert plan.offload.any()
    without = slow.without_offload()
    assert simulate(plan, slow).makespan < simulate(plan_step(plan.lengths, without), without).makespan
    quick = replace(slow, costs=replace(slow.costs, rates=rates._replace(kv=0.0, dkv=0.0)))
    assert not plan_step(plan.lengths, quick).offload.any()


def test_slow_ranks_get_less_and_rings_stay_in_one_class() -> None:
    ours = h200("offload.ratio=0")
    nodes = (*ours.cluster.nodes[:4], *(replace(node, speed=50) for node in ours.cluster.nodes[4:]))
    mixed = replace(ours, cluster=replace(ours.cluster, nodes=nodes))
    step = steps("lognormal", 1)
    plan = plan_step(step, mixed)
    assert simulate(plan, mixed).makespan <= 1.03 * lower_bound(step, mixed)
    assert simulate(plan, mixed).makespan < 0.8 * simulate(plan_step(step, ours), mixed).makespan
    speed = mixed.cluster.speed
    for sequence in range(plan.sequences):
        assert len({int(speed[rank]) for rank in plan.ring(sequence)}) == 1


@given(st.lists(st.integers(1, 28), min_size=9, max_size=20), st.sampled_from([0, 1_000_000]))
def test_only_what_its_own_ranks_cannot_hold_is_offloaded(step: list[int], offload: int) -> None:
    """Even if other ranks hold less; all micro-batches of a gang offload alike. Fewer sequences could take static."""
    cluster = Cluster((Node("large", 2), Node("small", 2, memory=device(8))), 2**20)
    ours = replace(settings("adaptive", 4, 16), cluster=cluster, offload=offload, host_memory=2**40)
    plan = plan_step(ints(*step), ours)
    over = micro_tokens(plan) - ints(16, 16, 8, 8)[plan.micro_rank]  # beyond what devices hold without offload
    assert (plan.offload[over > 0] > 0).all()
    tight = over > -1  # a ring's ratio is that of its largest shard
    assert (plan.offload[~np.isin(plan.gang, plan.gang[tight])] == 0).all()


@pytest.mark.parametrize(("nodes", "count", "context"), [(2, 20, "8K"), (2, 32, "8K"), (8, 80, "8K"), (8, 100, "16K")])
def test_with_few_sequences_a_rank_it_is_no_slower_than_the_others(nodes: int, count: int, context: str) -> None:
    config = load([*H200, f"cluster.nodes={nodes}", "capacity=8K", f"context={context}"])
    ours = Job(config).settings
    for seed in range(6):
        drawn = np.random.default_rng(seed).lognormal(np.log(4000), 1.2, count)
        step = np.clip(drawn, 64, ours.context).astype(np.int64)
        taken = {name: simulate(plan_step(step, ours.by(name)), ours).makespan for name in PLANNERS}
        assert taken["adaptive"] <= min(taken.values()) * (1 + 1e-9)


@given(
    planner=st.sampled_from(sorted(PLANNERS)),
    ranks=st.integers(1, 6),
    stages=st.integers(2, 4),
    data=st.data(),
)
def test_every_pipeline_finishes(planner: str, ranks: int, stages: int, data: st.DataObject) -> None:
    step = ints(*data.draw(lengths(ranks * 16, most=12)))
    plan = plan_step(step, settings(planner, ranks, mode="pipeline", stages=stages))
    assert (plan.mode, plan.stages) == ("pipeline", stages)
    assert finishes(plan)


@given(st.integers(1, 64), st.integers(1, 200), st.data())
def test_every_pipeline_holds_every_rule(ranks: int, capacity: int, data: st.DataObject) -> None:
    asked = settings("adaptive", ranks, capacity, mode="pipeline", stages=3)
    step = ints(*data.draw(lengths(ranks * capacity)))
    verify(plan_step(step, asked), asked)


@pytest.mark.parametrize("mix", ["github", "byted", "lognormal"])
def test_in_slots_it_is_no_worse_than_the_others_in_slots(mix: str) -> None:
    ours = h200("zero.stage=3", "offload.ratio=0")
    step = steps(mix, 3)
    taken = simulate(plan_step(step, ours), ours).makespan
    free = replace(ours, mode="free")
    for name in PLANNERS:
        assert taken <= simulate(lockstep(plan_step(step, free.by(name))), ours).makespan * (1 + 1e-9)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_capacity_that_needs_offload_does_not_slow_short_sequences(stage: int) -> None:
    """Micro-batches of 110K tokens would copy for longer than they compute: 1.36 times the bound, 1.40 in slots."""
    keys = [*LLAMA3_8B_256K, "cluster.nodes=128", "parallel.tp=2", f"zero.stage={stage}", "recompute=none"]
    config = load([*keys, "offload.ratio=auto", "capacity=110K", "cluster.headroom=0"])
    ours, (step,) = Job(config).settings, step_lengths(config, 1, lambda _: None)
    plain = ours.costs.most_tokens(ours.device_memory)
    assert plain < 40_000
    least = makespan(plan_step(step, replace(ours, capacity=plain)), ours)
    assert makespan(plan_step(step, ours), ours) <= 1.01 * least


def test_a_reduction_that_nothing_hides_makes_no_step_far_from_its_bound() -> None:
    """A plan that is as short as the bound is the only one that is tried."""
    keys = [*LLAMA3_8B_256K, "cluster.nodes=16", "parallel.tp=2", "zero.stage=1", "recompute=none"]
    config = load([*keys, "offload.ratio=auto", "capacity=110K", "cluster.headroom=0"])
    ours, (step,) = Job(config).settings, step_lengths(config, 1, lambda _: None)
    for reduction in (0, 10**12):
        tried = list[float]()

        def fitted(plan: StepPlan, given: PlanSettings, tried: list[float] = tried) -> StepPlan:
            found = FITTED(plan, given)
            tried.append(makespan(found, given))
            return found

        asked = replace(ours, costs=replace(ours.costs, reduction=reduction, last_bucket=1.0))
        with (
            patch.object(ratios, "fitted", fitted),
            patch("engine.planner.adaptive.adaptive.lower_bound", lambda *_, tried=tried: tried[0]),
        ):
            assert adaptive(step, asked).offload.any()
        assert len(tried) == 1
