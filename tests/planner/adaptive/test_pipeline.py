"""Plans of pipelines: every rule holds, long sequences are cut where that helps, and nothing gets slower."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.config.load import load
from engine.cost.activations import Instant
from engine.data.lengths import step_lengths
from engine.job import Job
from engine.planner.adaptive import pipeline
from engine.planner.adaptive.pipeline import uncut_pipeline
from engine.planner.adaptive.slots import slot_candidates
from engine.planner.adaptive.workload import lower_bound, workload_of
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.planner.time.makespan import makespan
from engine.simulator.facts import facts
from engine.units import PPM, Ints
from tests.planner.samples import COSTS, LINKED_COSTS, ints, lengths, settings, staged_costs
from tests.presets import LLAMA3_8B_256K


def uncut(step: Ints, ours: PlanSettings) -> StepPlan:
    workload = workload_of(step, ours)
    return uncut_pipeline(workload, slot_candidates(workload, ours), ours)


@pytest.mark.long
@hypothesis_settings(max_examples=60)
@given(lengths(64), st.integers(1, 5), st.integers(2, 4), st.sampled_from([1, 4]))
def test_no_plan_is_slower_than_whole_sequences_in_1f1b(step: list[int], ranks: int, stages: int, team: int) -> None:
    """`plan_step` verifies it: order, memory in flight, slices."""
    ours = settings("adaptive", ranks, 64, "pipeline", stages=stages, max_peers=16)
    costs = replace(LINKED_COSTS, rates=LINKED_COSTS.rates._replace(team=team))
    ours = replace(ours, costs=staged_costs(stages, costs))
    plan = plan_step(ints(*step), ours)
    assert makespan(plan, ours) <= makespan(uncut(ints(*step), ours), ours) * (1 + 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("mix", ["github", "byted"])
def test_a_pipeline_with_long_sequences_waits_little(mix: str) -> None:
    """70B on 8,192 GPUs: without slices, teams and an order of its own a step takes 1.6 to 2.3 times the bound."""
    config = load(["recipe=llama70b-2m-paper", f"lengths={mix}"])
    ours = Job(config).settings
    (step,) = step_lengths(config, 1, lambda _: None)
    plan, bound = plan_step(step, ours), lower_bound(step, ours)
    assert plan.slices > plan.sequences and plan.team.max() > 1
    assert makespan(plan, ours) < 1.2 * bound < 1.4 * bound < makespan(uncut(step, ours), ours)
    assert np.array_equal(plan.sequence_lengths, step)


def test_tight_memory_takes_whole_sequences_in_1f1b_order() -> None:
    """With memory for exactly what 1F1B holds, slices of a sequence and others cannot be in flight together."""
    step, ours = ints(64, *[2] * 40), settings("adaptive", 4, 16, "pipeline", stages=3)
    peak = int(ours.costs.peak_bytes(ints(16), ints(16))[0])
    tight = settings("adaptive", 4, 16, "pipeline", stages=3, device_memory=peak)
    assert makespan(plan_step(step, ours), ours) <= makespan(plan_step(step, tight), tight)


@pytest.mark.long
@hypothesis_settings(max_examples=60)
@given(lengths(64), st.integers(1, 4), st.integers(2, 4), st.integers(0, 10))
@example([64, *[20] * 4, *[32] * 4], 2, 2, 10)
def test_all_micro_batches_in_flight_fit_where_only_offload_makes_room(
    step: list[int], ranks: int, stages: int, tenth: int
) -> None:
    """A device has memory for one full micro-batch at this offload ratio, with the others that 1F1B has in flight.

    `plan_step` verifies it. Short micro-batches must not keep what the working set of a long one needs.
    """
    ours = settings("adaptive", ranks, 32, "pipeline", context=64, stages=stages)
    costs = staged_costs(stages, replace(COSTS, instants=(Instant(0, 200),)))
    ours = replace(ours, offload=PPM, host_memory=2**40, costs=costs)
    peak = int(costs.peak_bytes(ints(32), ints(32), tenth * PPM // 10)[0])
    ours = replace(ours, cluster=replace(ours.cluster, device_memory=peak))
    if max(step) <= 32 * ranks:
        assert (plan_step(ints(*step), ours).sequence_lengths == step).all()


def test_a_pipeline_of_many_slots_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GPUs and 4M tokens: in 512 slots, stages wait little in 1F1B order, and a search would take long."""
    keys = [*LLAMA3_8B_256K, "context=8K", "cluster.nodes=1", "parallel.pp=8", "zero.stage=1"]
    config = load([*keys, "offload.ratio=0", "capacity=8K", "batch_tokens=4M", "recompute=none"])
    ours, (step,) = Job(config).settings, step_lengths(config, 1, lambda _: None)
    monkeypatch.delattr(pipeline, "interleave")
    assert makespan(plan_step(step, ours), ours) < 1.03 * lower_bound(step, ours)


@pytest.mark.long
def test_the_stage_with_the_most_layers_decides() -> None:
    """Its share of the work counts, in plans and in the lower bound; the layers of others are not offloaded for it."""
    took, bounds = {}, {}
    for stages in ("auto", "[77,1,1,1]"):
        keys = ["recipe=llama70b-2m-paper", "batch_tokens=4M", "context=256K", f"parallel.stages={stages}"]
        config = load(keys)
        ours, (step,) = Job(config).settings, step_lengths(config, 1, lambda _: None)
        plan = plan_step(step, ours)
        took[stages], bounds[stages] = makespan(plan, ours), lower_bound(step, ours)
        assert (facts(plan, ours)["offloaded_share"] > 0) == plan.offload.any()
    assert 3.5 < bounds["[77,1,1,1]"] / bounds["auto"] < 4
    assert took["[77,1,1,1]"] > max(bounds["[77,1,1,1]"], 1.8 * took["auto"])
