"""The balance scheduler for pipelines: every rule kept, levels separate, fewer bubbles than the other form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.baselines.balanced import balanced
from engine.planner.baselines.balanced_pp import balanced_pp
from engine.planner.plan.modes import lockstep, pipelined
from engine.planner.plan.step_plan import StepPlan
from engine.planner.proof.verify import verify
from engine.planner.ratios import equation_3
from engine.planner.settings import PlanSettings
from engine.simulator.facts import outcome
from engine.simulator.timeline import simulate
from engine.units import PPM, Ints
from tests.planner.executor import finishes
from tests.planner.samples import COSTS, LINKED_COSTS, ints, lengths, settings


def heavy_tailed(seed: int, count: int, longest: int) -> Ints:
    """Lengths with a short median and a few that need many ranks."""
    drawn = np.random.default_rng(seed).lognormal(5.0, 1.6, count).astype(np.int64)
    return np.clip(drawn, 1, longest)


def asked_for(ranks: int, capacity: int, stages: int) -> PlanSettings:
    return settings("balanced", ranks, capacity, "pipeline", stages=stages)


@given(st.integers(1, 64), st.integers(1, 300), st.integers(2, 4), st.data())
def test_every_plan_holds_every_rule(ranks: int, capacity: int, stages: int, data: st.DataObject) -> None:
    """Each sequence once, with the degree of equation 3, in the same place on all its ranks; deterministic bytes."""
    step = ints(*data.draw(lengths(ranks * capacity)))
    costs, offload = data.draw(st.sampled_from([COSTS, LINKED_COSTS])), data.draw(st.sampled_from([0, 500_000, PPM]))
    asked = replace(asked_for(ranks, capacity, stages), costs=costs, offload=offload, host_memory=2**40)
    plan = balanced_pp(step, asked)
    verify(plan, asked)
    assert np.array_equal(plan.lengths, step)
    assert np.array_equal(plan.degrees, equation_3(step, asked)[0])
    place = np.arange(plan.micro_batches) - plan.micro_start[plan.micro_rank]
    assert len(set(zip(plan.gang.tolist(), place.tolist(), strict=True))) == len(set(plan.gang.tolist()))
    assert balanced_pp(step.copy(), asked).to_bytes() == plan.to_bytes()


@given(st.integers(1, 6), st.integers(1, 20), st.integers(2, 4), st.data())
def test_every_plan_finishes(ranks: int, capacity: int, stages: int, data: st.DataObject) -> None:
    step = ints(*data.draw(lengths(ranks * capacity, most=12)))
    assert finishes(balanced_pp(step, asked_for(ranks, capacity, stages)))


@given(st.integers(1, 32), st.integers(2, 4), st.data())
def test_long_sequences_of_a_pipeline_fall_in_length_and_short_ones_follow(
    ranks: int, stages: int, data: st.DataObject
) -> None:
    """Without offload; micro-batches of short sequences come after all long ones."""
    plan = balanced_pp(ints(*data.draw(lengths(ranks * 50))), asked_for(ranks, 50, stages))
    for rank in range(ranks):
        longest = [max((shard.length for shard in micro.shards), default=0) for micro in plan.of_rank(rank)]
        long = [length for length in longest if length > 50]
        assert longest[: len(long)] == sorted(long, reverse=True)


def bubble(plan: StepPlan, asked: PlanSettings) -> float:
    return float(outcome(plan, asked, simulate(plan, asked))["bubble"])


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_it_has_fewer_bubbles_than_the_form_without_pipelines(stages: int, seed: int) -> None:
    """The other form is converted through slots; a mixed trace."""
    step, asked = heavy_tailed(seed, 300, 8 * 1024), asked_for(16, 1024, stages)
    other = pipelined(lockstep(balanced(step, replace(asked, mode="free", stages=1))), stages)
    assert bubble(balanced_pp(step, asked), asked) < 0.9 * bubble(other, asked)


def test_one_level_leaves_the_bubbles_of_filling_and_draining_alone() -> None:
    """Eight micro-batches per rank on four stages: 8 of 11 time steps are busy."""
    asked = asked_for(4, 100, 4)
    plan = balanced_pp(np.full(32, 100, dtype=np.int64), asked)
    assert np.diff(plan.micro_start).tolist() == [8] * 4
    assert bubble(plan, asked) == pytest.approx(3 / 11, abs=1e-4)
