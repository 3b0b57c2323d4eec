"""Plans in slots on steps like those of the benchmarks, and the choice between candidates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.cost.model import Costs
from engine.planner.adaptive.slots import price, slot_candidates, slots_plan, slots_time
from engine.planner.adaptive.workload import lower_bound, workload_of
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.planner.proof.verify import verify
from engine.planner.settings import PlanSettings
from engine.simulator.timeline import balance, simulate
from engine.units import Ints
from tests.planner.samples import COSTS, settings

FREE = replace(COSTS, rates=COSTS.rates._replace(micro=0.0))  # slots and links cost nothing
LINKS = replace(
    COSTS, rates=COSTS.rates._replace(kv=5.0, dkv=10.0, latency=1000.0), slot=20_000, gathers=(30_000, 50_000)
)


def asked(costs: Costs = FREE, ranks: int = 32, capacity: int = 64) -> PlanSettings:
    return replace(settings("adaptive", ranks, capacity, mode="lockstep"), costs=costs)


def steps(seed: int, count: int = 256) -> Ints:
    random = np.random.Generator(np.random.Philox(key=seed))
    return np.clip(random.lognormal(3.5, 1.0, count), 4, 256).astype(np.int64)


def planned(step: Ints, ours: PlanSettings) -> StepPlan:
    """The best candidate in slots, the free plan aside."""
    workload = workload_of(step, ours)
    plans = (slots_plan(workload, slots, ours) for slots in slot_candidates(workload, ours))
    return min(plans, key=lambda plan: price(plan, ours))


@pytest.mark.parametrize("seed", range(4))
def test_slots_are_even_few_and_move_little(seed: int) -> None:
    ours, step = asked(), steps(seed)
    plan = planned(step, ours)
    verify(plan, ours)
    least = -(-int(step.sum()) // (32 * 64))
    needed = int((step * (-(-step // 64) - 1)).sum())
    assert balance(plan, ours) >= 0.95
    assert int(plan.slot.max()) + 1 <= 1.3 * least
    assert int((plan.lengths * (plan.degrees - 1)).sum()) <= 2 * needed


@pytest.mark.parametrize("costs", [FREE, LINKS])
def test_the_time_of_all_slots_equals_the_simulators(costs: Costs) -> None:
    ours = asked(costs)
    plan = planned(steps(2), ours)
    assert slots_time(plan, ours) == pytest.approx(simulate(plan, ours).makespan, rel=1e-6)


@pytest.mark.parametrize(("mode", "stages"), [("lockstep", 1), ("pipeline", 2)])
def test_slow_ranks_get_less_in_each_slot(mode: str, stages: int) -> None:
    nodes = (Node("fast", 4), Node("slow", 4, speed=50))
    even = replace(settings("adaptive", 8, 64, mode, stages=stages), cluster=Cluster((Node("all", 8),), 2**40))
    mixed = replace(even, cluster=Cluster(nodes, 2**40))
    step = np.random.default_rng(1).integers(1, 60, 200)
    aware, blind = (simulate(plan_step(step, asked), mixed).makespan for asked in (mixed, even))
    assert aware < 1.25 * lower_bound(step, mixed)
    assert blind > 1.4 * lower_bound(step, mixed)
