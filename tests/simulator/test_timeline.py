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
