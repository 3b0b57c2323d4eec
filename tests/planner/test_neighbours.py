"""Ranks meet before step 1. If these fail, a step waits until NCCL has connected them, or they wait for each other."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config.load import load
from engine.cost.allowance import PEERS
from engine.planner.make import plan_step
from engine.planner.neighbours import neighbours
from engine.planner.settings import PlanSettings


@pytest.mark.parametrize("planner", ["static", "naive", "balanced", "adaptive"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 12])
def test_no_plan_has_a_ring_with_anybody_else(planner: str, ranks: int) -> None:
    longest = 512 * min(ranks, 4)
    world = [f"planner={planner}", f"cluster.ranks_per_node={ranks}", f"context={longest}", "capacity=512"]
    settings = PlanSettings.of(load(["recipe=quickstart", *world]))
    known = [neighbours(rank, settings) for rank in range(ranks)]
    assert all(rank in known[peer] for rank in range(ranks) for peer in known[rank]), "both sides must name each other"
    assert max(map(len, known)) <= PEERS, "the memory estimate counts so many"
    random, hops = np.random.default_rng(ranks), set()
    for _ in range(5):
        plan = plan_step(random.integers(1, longest + 1, 40), settings)
        hops |= set(zip(plan.ring_ranks.tolist(), plan.ring_ranks[plan.next_shard].tolist(), strict=True))
    met = {(one, other) for one, other in hops if one != other}
    assert all(other in known[one] for one, other in met)
    assert met or ranks == 1
