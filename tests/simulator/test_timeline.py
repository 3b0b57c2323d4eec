from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.emit import emit
from engine.planner.loads import micro_costs
from engine.planner.lockstep import lockstep
from engine.planner.make import PLANNERS, plan_step
from engine.simulator.timeline import balance, simulate
from tests.planner.samples import COSTS, ints, lengths, settings

FREE = replace(COSTS, linear=10, attention=0, fixed=0)  # ten units a token and nothing else


def test_a_gang_starts_when_its_last_member_is_free_and_lasts_as_long_as_its_largest() -> None:
    groups = [[(0, (0,))], [(1, (0, 1))], [(2, (1,))]]
    plan = emit("by hand", "free", 3, 99, ints(5, 7, 2), groups)
    line = simulate(plan, FREE)
    assert line.rank.tolist() == [0, 0, 1, 1, 2]
    assert line.start.tolist() == [0, 50, 50, 90, 0]
    assert line.stop.tolist() == [50, 90, 90, 110, 0]  # of 7 tokens one rank has 4
    assert line.makespan == 110


def test_in_lockstep_all_ranks_wait_in_every_slot() -> None:
    groups = [[(0, (0,))], [(1, (1,))], [(2, (1,))]]
    plan = lockstep(emit("by hand", "free", 2, 99, ints(5, 2, 3), groups))
    line = simulate(plan, FREE)
    assert line.start.tolist() == [0, 50, 0, 50]
    assert line.makespan == 80


def test_balance_is_useful_work_over_the_makespan() -> None:
    plan = emit("by hand", "free", 2, 99, ints(6, 3), [[(0, (0,))], [(1, (1,))]])
    assert balance(plan, FREE) == pytest.approx(90 / (2 * 60))
    even = emit("by hand", "free", 2, 99, ints(6, 6), [[(0, (0,))], [(1, (1,))]])
    assert balance(even, FREE) == 1
    assert balance(even, COSTS) < 1, "the fixed cost of a micro-batch is no useful work"


def test_gangs_may_have_any_numbers() -> None:
    plan = emit("by hand", "free", 3, 99, ints(5, 7, 2), [[(0, (0,))], [(1, (0, 1))], [(2, (1,))]])
    names = replace(plan, gang=ints(3, 2, 2, 0, 1))
    assert simulate(names, FREE).stop.tolist() == simulate(plan, FREE).stop.tolist()


@given(st.sampled_from(sorted(PLANNERS)), st.sampled_from(["free", "lockstep"]), st.integers(1, 9), st.data())
def test_ranks_do_one_thing_at_a_time_and_gangs_start_together(
    planner: str, mode: str, ranks: int, data: st.DataObject
) -> None:
    plan = plan_step(ints(*data.draw(lengths(ranks * 16))), settings(planner, ranks, mode=mode))
    line = simulate(plan, COSTS)
    assert (line.stop - line.start >= micro_costs(plan, COSTS)).all()
    for rank in range(ranks):
        mine = line.rank == rank
        assert (line.start[mine][1:] >= line.stop[mine][:-1]).all()
    for gang in np.unique(plan.gang).tolist():
        assert len(set(line.start[plan.gang == gang].tolist())) == 1
    assert 0 < balance(plan, COSTS) <= 1
