"""Plans in slots on steps like the benchmark's, and which of several plans is taken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.cost.model import Costs
from engine.planner.durations import by_slot, gang_times
from engine.planner.emit import emit
from engine.planner.lockstep import lockstep
from engine.planner.make import plan_step
from engine.planner.plan import Ints
from engine.planner.problem import lower_bound, problem_of
from engine.planner.settings import PlanSettings
from engine.planner.slotted import plan_in_slots, total_time
from engine.planner.static import static
from engine.planner.verify import verify
from engine.simulator.timeline import balance, simulate
from tests.planner.samples import COSTS, ints, settings

FREE = replace(COSTS, rates=COSTS.rates._replace(micro=0.0))  # slots and links cost nothing
LINKS = replace(COSTS, rates=COSTS.rates._replace(kv=5.0, dkv=10.0, latency=1000.0), slot=20_000)


def asked(costs: Costs = FREE, ranks: int = 32, capacity: int = 64) -> PlanSettings:
    return replace(settings("adaptive", ranks, capacity, mode="lockstep"), costs=costs)


def steps(seed: int, count: int = 256) -> Ints:
    random = np.random.Generator(np.random.Philox(key=seed))
    return np.clip(random.lognormal(3.5, 1.0, count), 4, 256).astype(np.int64)


@pytest.mark.parametrize("seed", range(4))
def test_slots_are_even_few_and_move_little(seed: int) -> None:
    ours, step = asked(), steps(seed)
    plan = plan_in_slots(problem_of(step, ours), ours)
    verify(plan, ours)
    least = -(-int(step.sum()) // (32 * 64))
    needed = int((step * (-(-step // 64) - 1)).sum())
    assert balance(plan, ours) >= 0.95
    assert int(plan.slot.max()) + 1 <= 1.3 * least
    assert int((plan.lengths * (plan.degrees - 1)).sum()) <= 2 * needed


@pytest.mark.parametrize("costs", [FREE, LINKS])
def test_the_time_of_all_slots_is_the_simulators(costs: Costs) -> None:
    ours = asked(costs)
    plan = plan_in_slots(problem_of(steps(2), ours), ours)
    assert total_time(plan, ours) == pytest.approx(simulate(plan, ours).makespan, rel=1e-6)


def test_in_a_pipeline_every_stage_more_waits_for_the_longest_slot() -> None:
    ours, step = asked(LINKS), steps(2)
    plan = plan_in_slots(problem_of(step, ours), ours)
    gangs = gang_times(plan, ours.costs, ours.cluster)
    longest = max(sum(both) for both in zip(*(times.tolist() for times in by_slot(plan, gangs)), strict=True))
    pipeline = replace(ours, mode="pipeline", stages=3)
    assert total_time(plan, pipeline) == pytest.approx(total_time(plan, ours) + 2 * longest)


def test_the_shorter_of_two_plans_is_taken() -> None:
    ours, step = asked(LINKS), steps(0)
    plan = plan_in_slots(problem_of(step, ours), ours)
    other = lockstep(static(step, replace(ours, mode="free")))
    taken = plan_in_slots(problem_of(step, ours), ours, [other])
    assert total_time(taken, ours) == min(total_time(plan, ours), total_time(other, ours))


def test_where_links_cost_nothing_it_still_does_not_cut_everything() -> None:
    """All ranks for each sequence are even to the last token, and move thirty times as much."""
    ours, step = asked(capacity=2048), 32 * np.sort(steps(1))
    slot = np.cumsum(step) // 60_000
    groups = [[(int(at), range(32)) for at in np.flatnonzero(slot == number)] for number in range(slot[-1] + 1)]
    cut = emit("static", "lockstep", 32, 2048, step, groups)
    taken = plan_in_slots(problem_of(step, ours), ours, [cut])
    assert total_time(cut, ours) < total_time(taken, ours)
    assert taken.degrees.max() < 32


def test_a_giant_and_short_ones_take_few_slots() -> None:
    ours = asked(LINKS)
    step = ints(32 * 48, *[5] * 600)
    plan = plan_in_slots(problem_of(step, ours), ours)
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
