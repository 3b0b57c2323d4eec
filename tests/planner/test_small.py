from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.planner.free import best_candidate, plan_of
from engine.planner.make import plan_step
from engine.planner.problem import problem_of
from engine.planner.small import is_small, searched
from engine.simulator.timeline import simulate
from tests.planner.samples import COSTS, settings
from tests.simulator.worlds import RATES


@pytest.mark.parametrize("far", [1.0, 50.0])
def test_what_a_search_finds_is_shorter_also_where_rings_leave_a_node(far: float) -> None:
    """It counts what a ring over two nodes takes, so its plan never is longer than the skyline's."""
    rates = RATES._replace(far=far)
    ours = replace(settings("adaptive", 4, 48), costs=replace(COSTS, rates=rates))
    ours = replace(ours, cluster=Cluster((Node("a", 2), Node("b", 2)), 2**40))
    shorter = 0
    for seed in range(12):
        step = np.random.default_rng(seed).integers(1, 120, 6)
        problem = problem_of(step, ours)
        assert is_small(problem, ours)
        best = best_candidate(problem)
        found = searched(problem, best, ours)
        if found is not None:
            skyline = simulate(plan_of(problem, best, ours), ours).makespan
            assert simulate(found, ours).makespan <= skyline * (1 + 1e-9)
            shorter += simulate(found, ours).makespan < 0.99 * skyline
            assert simulate(plan_step(step, ours), ours).makespan <= simulate(found, ours).makespan * (1 + 1e-9)
    assert shorter


def test_no_sequence_gets_ranks_without_a_token() -> None:
    ours = settings("adaptive", 4, 48)
    for seed in range(20):
        step = np.random.default_rng(seed).integers(1, 9, 5)
        problem = problem_of(step, ours)
        found = searched(problem, replace(best_candidate(problem), height=np.full(4, np.inf)), ours)
        assert found is not None
        assert (found.degrees <= np.maximum(1, (step + 1) // 2)).all()
