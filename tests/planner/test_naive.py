from __future__ import annotations

from engine.planner.make import plan_step
from tests.planner.samples import ints, settings


def test_rings_take_the_next_ranks_round_the_world_then_packs_do() -> None:
    plan = plan_step(ints(40, 9, 33, 16, 6, 8, 30), settings("naive", ranks=4))
    rings = [plan.ring(sequence) for sequence in range(7)]
    assert [rings[0], rings[2], rings[3], rings[6]] == [(0, 2, 1), (3, 1, 0), (2,), (3, 0)]
    assert [rings[1], rings[4], rings[5]] == [(1,), (1,), (2,)]


def test_nothing_is_balanced() -> None:
    """Four equal packs on four ranks, and a fifth on the rank that is busiest already."""
    plan = plan_step(ints(16, 15, 1, 2, 14, 3, 13), settings("naive", ranks=2))
    assert [sum(shard.length for micro in plan.of_rank(rank) for shard in micro.shards) for rank in (0, 1)] == [32, 32]
    uneven = plan_step(ints(16, 1, 16, 1), settings("naive", ranks=3))
    assert [[s.length for m in uneven.of_rank(r) for s in m.shards] for r in range(3)] == [[16], [16], [1, 1]]
