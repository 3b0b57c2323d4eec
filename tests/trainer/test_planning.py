"""The plan of a step is the same on every rank, and a rank that would run something else is found out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from engine.config.load import load
from engine.config.schema import Config
from engine.data.index import build_index
from engine.data.steps import Cursor
from engine.errors import PlanError
from engine.planner.make import PlanSettings, plan_step
from engine.trainer.planning import Feed, PlanAhead, compare_digests
from tests.world import run_world

pytestmark = pytest.mark.world


def settings(folder: Path) -> Config:
    small = ["recipe=quickstart", "context=256", "capacity=128", "batch_tokens=512", f"data.path={folder}"]
    return load(small)


def plans(folder: Path) -> list[str]:
    """On a rank: the digests of three steps."""
    config, control = settings(folder), dist.new_group()
    feed = Feed.of(config, folder / "index.npz")
    ahead = PlanAhead(feed, PlanSettings.of(config), dist.get_rank(), control)
    cursor, digests = Cursor(), []
    ahead.request(cursor)
    for _ in range(3):
        table, cursor, plan = ahead.take(cursor)
        ahead.request(cursor)
        assert np.array_equal(plan.lengths, table.length)
        digests.append(plan.digest)
    if dist.get_world_size() == 1:
        with pytest.raises(PlanError, match="other documents"):
            ahead.take(Cursor(epoch=7))
    ahead.close()
    return digests


def disagree() -> str:
    with pytest.raises(PlanError) as caught:
        compare_digests("ab"[dist.get_rank()], dist.new_group())
    return str(caught.value)


@pytest.mark.parametrize("world", [1, 2])
def test_all_ranks_get_the_plan_that_planning_in_place_gives(tmp_path: Path, world: int) -> None:
    for number in range(20):
        (tmp_path / f"{number}.py").write_text("x" * (37 * number + 1))
    config = settings(tmp_path)
    build_index(config.data).save(tmp_path / "index.npz")
    cursor, expected, feed = Cursor(), [], Feed.of(config, tmp_path / "index.npz")
    for _ in range(3):
        table, cursor = feed.step(cursor)
        expected.append(plan_step(table.length, PlanSettings.of(config)).digest)
    assert run_world(world, plans, tmp_path) == [expected] * world


def test_ranks_that_hold_different_plans_find_out() -> None:
    assert all("rank 1 holds another plan" in said for said in run_world(2, disagree))
