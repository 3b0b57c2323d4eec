from __future__ import annotations

from engine.hardware.micro_batches import random_inputs
from engine.planner.plan.step_plan import MicroBatch, Shard


def test_positions_go_on_where_earlier_slices_end() -> None:
    shards = (Shard(0, 4, (0, 1), 1, earlier=(6, 3), later=2), Shard(1, 3, (1,), 0))
    inputs = random_inputs(MicroBatch(0, rank=1, gang=0, slot=-1, shards=shards), vocab=50)
    assert inputs.positions.tolist() == [10, 11, 0, 1, 2]
    assert len(inputs.tokens) == len(inputs.labels) == 5
