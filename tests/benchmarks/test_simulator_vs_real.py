"""All that needs no ranks; the ranks themselves run by hand (RESULTS.md)."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import simulator_vs_real as real
from engine.config.load import load
from engine.data.inputs import IGNORE, RankInputs
from engine.job import Job
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.simulator.timeline import simulate

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def settings() -> PlanSettings:
    return Job(load(real.OVERRIDES)).settings.without_offload()


@pytest.fixture(scope="module")
def made(settings: PlanSettings) -> dict[str, StepPlan]:
    return real.plans(settings)


def test_ten_plans_of_one_batch_good_and_bad(made: dict[str, StepPlan], settings: PlanSettings) -> None:
    times = [simulate(plan, settings).makespan for plan in made.values()]
    assert len(made) == 10
    assert {plan.lengths.tobytes() for plan in made.values()} == {real.LENGTHS.tobytes()}
    assert times[0] == min(times) and max(times) > 1.5 * min(times)


def test_a_simulator_that_is_right_has_no_error(made: dict[str, StepPlan], settings: PlanSettings) -> None:
    measured = {name: real.simulated_s(plan, settings) for name, plan in made.items()}
    *plans, simulator, tokens, squares = real.report(made, settings, measured)
    assert [row["plan"] for row in plans] == list(made) and all(row["error_%"] == 0 for row in plans)
    assert (simulator["median_error_%"], simulator["rank_correlation"]) == (0, pytest.approx(1))
    assert (tokens["predictor"], squares["predictor"]) == ("largest tokens", "largest sum of s^2")


def test_the_largest_rank(made: dict[str, StepPlan]) -> None:
    plan = made["the longest alone on rank 1"]
    assert real.largest(plan, plan.lengths) == max(4000, int(real.LENGTHS[1:].sum()))


def test_rank_correlation() -> None:
    assert real.correlation([1, 5, 9], [2, 3, 100]) == pytest.approx(1)
    assert real.correlation([1, 5, 9], [100, 3, 2]) == pytest.approx(-1)


def test_an_idle_part_counts_for_nothing() -> None:
    some = RankInputs(*(np.arange(3) for _ in range(3)))
    assert real.idle_part(some).labels.tolist() == [IGNORE]


def test_a_gang_takes_the_mean_of_ranks_with_equal_work(made: dict[str, StepPlan], settings: PlanSettings) -> None:
    plan = made["a ring each, packed"]
    assert plan.gangs == 1
    assert real.makespan_of(plan, {0: 1.0, 1: 5.0}, settings) == pytest.approx(3.0)
    one_by_one = made["a ring each, one by one"]
    seconds = {number: 1.0 + number % 3 for number in range(one_by_one.micro_batches)}
    assert real.makespan_of(one_by_one, seconds, settings) == pytest.approx(sum(seconds.values()) / 2)


def test_another_gang_takes_its_longest(made: dict[str, StepPlan], settings: PlanSettings) -> None:
    plan = made["adaptive"]
    assert (plan.gangs, plan.micro_batches) == (1, 2)
    assert real.makespan_of(plan, {0: 1.0, 1: 5.0}, settings) == pytest.approx(5.0)


def test_a_slot_takes_its_longest_gang() -> None:
    settings = Job(load([*real.OVERRIDES, "zero.stage=3"])).settings.without_offload()
    plan = real.plans(settings)["alternating ranks, one by one"]
    assert plan.mode == "lockstep" and plan.micro_batches == 2 * len(real.LENGTHS), "with an idle one in each slot"
    taken = np.arange(plan.micro_batches, dtype=float)
    longest = sum(taken[plan.slot == slot].max() for slot in range(len(real.LENGTHS)))
    assert real.makespan_of(plan, dict(enumerate(taken.tolist())), settings) == pytest.approx(longest)
