from __future__ import annotations

import numpy as np
import pytest

from engine.planner.make import plan_step
from engine.planner.planners import PLANNERS
from engine.simulator.timeline import balance, simulate
from engine.units import Ints
from tests.planner.samples import settings


def heavy_tailed(seed: int, count: int, longest: int) -> Ints:
    """Lengths with a short median and a few that need many ranks."""
    drawn = np.random.default_rng(seed).lognormal(5.0, 1.6, count).astype(np.int64)
    return np.clip(drawn, 1, longest)


@pytest.mark.parametrize("seed", range(5))
def test_it_balances_better_than_the_others(seed: int) -> None:
    """Compute only: a mesh is balanced inside each of its groups, but not between groups."""
    ranks, capacity, context = 64, 1024, 16 * 1024
    step = heavy_tailed(seed, 600, context)
    plans = {name: plan_step(step, settings(name, ranks, capacity, context=context)) for name in PLANNERS}
    makespan = {name: simulate(plan, settings(ranks=ranks)).makespan for name, plan in plans.items()}
    assert makespan["balanced"] < makespan["static"] and makespan["balanced"] < makespan["naive"]
    assert balance(plans["balanced"], settings(ranks=ranks)) > 0.9
