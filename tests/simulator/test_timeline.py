from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.make import plan_step
from engine.planner.plan.emit import emit
from engine.planner.plan.loads import micro_tokens
from engine.planner.planners import PLANNERS
from engine.planner.settings import PlanSettings
from engine.planner.time.durations import gang_times
from engine.simulator.timeline import balance, simulate, useful
from tests.planner.samples import COSTS, ints, lengths, settings
from tests.simulator.reference import slow_simulate
from tests.simulator.worlds import World, worlds

RATES = COSTS.rates._replace(token_f=3.0, token_b=7.0, pair_f=0.0, pair_b=0.0, micro=0.0)
FREE = replace(settings(), costs=replace(COSTS, rates=RATES))  # ten nanoseconds per token, all else is zero


def of(ranks: int) -> PlanSettings:
    return replace(FREE, cluster=settings(ranks=ranks).cluster)


def test_balance_is_useful_work_over_the_makespan() -> None:
    plan = emit("by hand", "free", 2, 99, ints(6, 3), [[(0, (0,))], [(1, (1,))]])
    assert balance(plan, of(2)) == pytest.approx(90 / (2 * 60))
    even = emit("by hand", "free", 2, 99, ints(6, 6), [[(0, (0,))], [(1, (1,))]])
    assert balance(even, of(2)) == 1
    assert balance(even, settings(ranks=2)) < 1, "the fixed cost of a micro-batch is not useful work"


@given(worlds)
def test_times_are_those_of_the_slow_simulator(world: World) -> None:
    """In every mode. Times are rounded to whole nanoseconds, means are not."""
    line, slow = simulate(*world), slow_simulate(*world)
    assert line.start.tolist() == pytest.approx([slow.start[micro] for micro in line.micro_batch.tolist()], abs=0.51)
    assert line.stop.tolist() == pytest.approx([slow.stop[micro] for micro in line.micro_batch.tolist()], abs=0.51)
    assert line.makespan == pytest.approx(slow.makespan, abs=0.51)
    ranks = world.plan.ranks
    assert (line.compute, line.exposed) == pytest.approx(
        (slow.compute / ranks, slow.exposed / ranks), rel=1e-9, abs=1e-6
    )


@pytest.mark.parametrize(("reduction", "hidden"), [(0, 0), (20, 15), (100, 31.5)])
def test_a_reduction_hides_behind_the_last_backward_passes_except_for_a_bucket(reduction: int, hidden: float) -> None:
    """In four buckets. Rank 0 finishes last, at 60 ns, and has its first bucket at 60 - 3 / 4 x 42."""
    asked = replace(of(2), costs=replace(FREE.costs, step=reduction + 7, reduction=reduction, last_bucket=0.25))
    plan = emit("by hand", "free", 2, 99, ints(6, 3), [[(0, (0,))], [(1, (1,))]])
    line = simulate(plan, asked)
    assert (line.makespan, line.hidden) == (60, hidden)
    assert line.step_ns(asked.costs) == 60 + reduction + 7 - hidden
    unmarked = replace(plan, overlap=ints(0, 1))
    assert simulate(unmarked, asked).hidden == 0, "rank 0 has its gradients at its end"


@given(worlds, st.integers(1, 9), st.floats(0.01, 3))
def test_a_reduction_ends_as_if_each_bucket_were_simulated(world: World, buckets: int, share: float) -> None:
    plan, asked = world
    reduction = round(share * simulate(plan, asked).makespan)
    asked = replace(asked, costs=replace(asked.costs, reduction=reduction, last_bucket=1 / buckets))
    line = simulate(plan, asked)
    if plan.mode != "free":
        assert line.hidden == 0
        return
    backward, end = gang_times(plan, asked.costs, asked.cluster).backward, 0.0
    for bucket in range(1, buckets + 1):
        for rank in range(plan.ranks):
            last = plan.micro_start[rank + 1] - 1
            left = (1 - bucket / buckets) * backward[plan.gang[last]]  # of the pass
            end = max(end, line.stop[last] - (left if plan.overlaps(rank) else 0))
        end += reduction / buckets
    assert line.makespan + reduction - line.hidden == pytest.approx(end, abs=2)


@given(worlds)
def test_compute_and_exposed_transfers_are_within_the_makespan(world: World) -> None:
    """Also in a pipeline, where both are those of one of a rank's stages."""
    line = simulate(*world)
    assert line.compute > 0 and line.exposed >= 0
    assert line.compute + line.exposed <= line.makespan + 1
    if len(set(world.settings.cluster.speed.tolist())) == 1:
        assert useful(world.plan.sequence_lengths, world.settings) <= line.compute + world.plan.sequences, (
            "rounded each"
        )


@given(st.sampled_from(sorted(PLANNERS)), st.sampled_from(["free", "lockstep"]), st.integers(1, 9), st.data())
def test_ranks_do_one_thing_at_a_time_and_gangs_start_together(
    planner: str, mode: str, ranks: int, data: st.DataObject
) -> None:
    asked = settings(planner, ranks, mode=mode)
    plan = plan_step(ints(*data.draw(lengths(ranks * 16))), asked)
    line = simulate(plan, asked)
    work = COSTS.rates.token_f + COSTS.rates.token_b
    assert (line.stop - line.start >= micro_tokens(plan) * work).all()
    for rank in range(ranks):
        mine = line.rank == rank
        assert (line.start[mine][1:] >= line.stop[mine][:-1]).all()
    for gang in np.unique(plan.gang).tolist():
        assert len(set(line.start[plan.gang == gang].tolist())) == 1
    assert 0 < balance(plan, asked) <= 1
