"""All that needs no ranks; the ranks themselves run by hand (RESULTS.md)."""

from __future__ import annotations

import pytest

from benchmarks import simulator_vs_real as real
from engine.config.load import load
from engine.job import Job
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def settings() -> PlanSettings:
    return Job(load(real.OVERRIDES)).settings.without_offload()


@pytest.fixture(scope="module")
def made(settings: PlanSettings) -> dict[str, StepPlan]:
    return real.plans(settings)


def test_a_simulator_that_is_right_has_no_error(made: dict[str, StepPlan], settings: PlanSettings) -> None:
    measured = {name: real.simulated_s(plan, settings) for name, plan in made.items()}
    *plans, simulator, tokens, squares = real.report(made, settings, measured)
    assert [row["plan"] for row in plans] == list(made) and all(row["error_%"] == 0 for row in plans)
    assert (simulator["median_error_%"], simulator["rank_correlation"]) == (0, pytest.approx(1))
    assert (tokens["predictor"], squares["predictor"]) == ("largest tokens", "largest sum of s^2")
