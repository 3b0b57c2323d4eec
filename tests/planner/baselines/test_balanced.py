from __future__ import annotations

import numpy as np
import pytest

from engine.planner.make import plan_step
from engine.planner.planners import PLANNERS
from engine.simulator.timeline import balance, simulate
from engine.units import Ints
from tests.planner.samples import ints, settings


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


def test_ranks_run_different_numbers_of_micro_batches_of_equal_work() -> None:
    """A sequence that costs as much as four short ones: three ranks, five micro-batches."""
    step = ints(1000, *[400] * 8)
    plan = plan_step(step, settings(ranks=3, capacity=1000))
    assert sorted(np.diff(plan.micro_start).tolist()) == [1, 2, 2]


def test_short_sequences_fill_the_gap_before_a_ring() -> None:
    """Rings of 3, 2 and 2: the last is on ranks 2 and 3, and rank 3 is idle while rank 2 runs the first."""
    step = ints(3000, 2000, 1900, *[100] * 8)
    plan = plan_step(step, settings(ranks=4, capacity=1000))
    assert [sorted(plan.ring(sequence)) for sequence in range(3)] == [[0, 1, 2], [0, 1], [2, 3]]
    assert [max(shard.degree for shard in micro.shards) for micro in plan.of_rank(3)] == [1, 2]
    line = simulate(plan, settings())
    rank_2, rank_3 = (np.flatnonzero(plan.micro_rank == rank) for rank in (2, 3))
    assert line.start[rank_3[1]] == line.stop[rank_2[0]] >= line.stop[rank_3[0]] > 0


def test_every_short_sequence_of_a_rank_is_packed() -> None:
    plan = plan_step(np.full(64, 4, dtype=np.int64), settings(ranks=4, capacity=16))
    assert np.diff(plan.micro_start).tolist() == [4, 4, 4, 4]
    assert np.diff(plan.shard_start).tolist() == [4] * 16
