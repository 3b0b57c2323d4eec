"""Plans in slots on steps like those of the benchmarks, and the choice between candidates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.cost.model import Costs
from engine.planner.adaptive.adaptive import adaptive
from engine.planner.adaptive.slots import price, slot_candidates, slots_plan, slots_time
from engine.planner.adaptive.workload import lower_bound, workload_of
from engine.planner.make import plan_step
from engine.planner.plan.emit import emit
from engine.planner.plan.modes import lockstep
from engine.planner.plan.step_plan import StepPlan
from engine.planner.proof.verify import verify
from engine.planner.settings import PlanSettings
from engine.planner.time.durations import by_slot, gang_times
from engine.simulator.timeline import balance, simulate
from engine.units import Ints
from tests.planner.samples import COSTS, ints, settings

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


def test_in_a_pipeline_each_further_stage_waits_for_the_longest_slot() -> None:
    ours, step = asked(LINKS), steps(2)
    plan = planned(step, ours)
    gangs = gang_times(plan, ours.costs, ours.cluster)
    longest = max(
        sum(both) for both in zip(*(times.tolist() for times in by_slot(plan, gangs, ours.costs)), strict=True)
    )
    pipeline = replace(ours, mode="pipeline", stages=3)
    assert slots_time(plan, pipeline) == pytest.approx(slots_time(plan, ours) + 2 * longest)


def test_the_cheapest_candidate_is_taken() -> None:
    ours, step = asked(LINKS), steps(0)
    free = lockstep(adaptive(step, replace(ours, mode="free")))
    prices = [price(plan, ours) for plan in (planned(step, ours), free)]
    assert price(adaptive(step, ours), ours) == min(prices) < max(prices)


def test_where_links_cost_nothing_not_every_sequence_is_split() -> None:
    """All ranks for each sequence would be perfectly even, and move thirty times as much."""
    ours, step = asked(capacity=2048), 32 * np.sort(steps(1))
    slot = np.cumsum(step) // 60_000
    groups = [[(int(at), range(32)) for at in np.flatnonzero(slot == number)] for number in range(slot[-1] + 1)]
    cut = emit("static", "lockstep", 32, 2048, step, groups)
    taken = planned(step, ours)
    assert slots_time(cut, ours) < slots_time(taken, ours) and price(cut, ours) > price(taken, ours)
    assert taken.degrees.max() < 32


def test_a_giant_and_short_ones_take_few_slots() -> None:
    ours = asked(LINKS)
    step = ints(32 * 48, *[5] * 600)
    plan = planned(step, ours)
    verify(plan, ours)
    assert int(plan.slot.max()) + 1 <= 3


@pytest.mark.parametrize(("mode", "stages"), [("lockstep", 1), ("pipeline", 2)])
def test_slow_ranks_get_less_in_each_slot(mode: str, stages: int) -> None:
    nodes = (Node("fast", 4), Node("slow", 4, speed=50))
    even = replace(settings("adaptive", 8, 64, mode, stages=stages), cluster=Cluster((Node("all", 8),), 2**40))
    mixed = replace(even, cluster=Cluster(nodes, 2**40))
    step = np.random.default_rng(1).integers(1, 60, 200)
    aware, blind = (simulate(plan_step(step, asked), mixed).makespan for asked in (mixed, even))
    assert aware < 1.25 * lower_bound(step, mixed)
    assert blind > 1.4 * lower_bound(step, mixed)
