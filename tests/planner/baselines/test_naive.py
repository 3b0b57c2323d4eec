from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.planner.make import plan_step
from engine.planner.plan.loads import micro_tokens
from engine.units import PPM
from tests.planner.samples import COSTS, device, ints, settings


@pytest.mark.parametrize("mode", ["free", "lockstep", "pipeline"])
@pytest.mark.parametrize("planner", ["static", "naive", "balanced"])
def test_the_baselines_plan_for_the_rank_that_holds_the_least(planner: str, mode: str) -> None:
    """If half of the ranks hold half as much, the plan is that of ranks which all do, and no rank holds more."""
    half = device(25)
    mixed = Cluster((Node("large", 4), Node("small", 4, memory=half)), device_memory=2**20)
    equal = Cluster((Node("large", 4), Node("small", 4)), device_memory=half)
    asked = replace(settings(planner, 8, 50, mode, context=200), cluster=mixed)
    assert asked.capacities.tolist() == [50] * 4 + [25] * 4
    step = np.random.default_rng(1).integers(1, 200, 60)
    plan, alike = plan_step(step, asked), plan_step(step, replace(asked, cluster=equal, capacity=25))
    assert replace(plan, capacity=25).digest == alike.digest
    assert micro_tokens(plan).max() <= 25


@pytest.mark.parametrize("planner", ["naive", "balanced"])
@given(st.lists(st.integers(1, 64), min_size=1, max_size=12), st.sampled_from([0.0, 20.0, 200.0, 2000.0]), st.data())
def test_offload_is_equation_3s(planner: str, step: list[int], copy: float, data: st.DataObject) -> None:
    """Tries every ratio in hundredths: the least degree belongs to the largest ratio whose copies are hidden."""
    most = data.draw(st.sampled_from([0, 40, 100]))
    windowed = data.draw(st.sampled_from([0.0, 0.5]))
    rates = COSTS.rates._replace(copy=copy + 1e-9, window=20.0, windowed=windowed)
    costs = replace(COSTS, layers=10, rates=rates)
    asked = replace(settings(planner, ranks=4), offload=most * PPM // 100, host_memory=2**40, costs=costs)
    plan = plan_step(ints(*step), asked)
    for sequence, length in enumerate(step):
        plain = -(-length // 16)
        keys = [position + 1 for position in range(length)]
        causal = (1 - windowed) * sum(keys) + windowed * sum(min(20, own) for own in keys)
        forward = 300.0 + 0.5 * causal / length  # a token's, and its part of the pairs
        hidden = [r for r in range(most + 1) if r / 100 * copy <= forward]
        degrees = [-(-length * Fraction(200 + (100 - r) * 8, 1000) // 16) for r in hidden]
        frees_a_rank = [Fraction(r, 100) >= min(1, Fraction(10 * 16, 8 * length)) for r in hidden]
        expected = min(degrees) if any(frees_a_rank) and min(degrees) < plain else plain
        assert plan.degrees[sequence] == expected
        held = -(-length // expected)
        for shard in range(int(plan.ring_start[sequence]), int(plan.ring_start[sequence + 1])):
            ratio = int(plan.offload[plan.shard_micro[shard]])
            assert (ratio > 0) == (held > 16), "no more than it must"
            assert costs.resident(ints(held), ratio)[0] <= 16
