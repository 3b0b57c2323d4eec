"""Each rank plans for itself, ahead; what it plans is what planning in place gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.data.pack import pack
from engine.data.steps import Cursor
from engine.planner.make import plan_step
from engine.planner.settings import PlanSettings
from engine.simulator.timeline import balance
from engine.trainer.feed import Feed
from engine.trainer.planning import PlanAhead


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run of small documents, which are packed."""
    for number in range(20):
        (tmp_path / f"{number}.py").write_text("x" * (37 * number + 1))
    small = ["recipe=quickstart", "context=256", "capacity=128", "batch_tokens=512", f"data.path={tmp_path}"]
    made = load(small)
    pack(made.data, tmp_path / "tokens")
    return made


def test_plans_are_those_that_planning_in_place_gives(tmp_path: Path, config: Config) -> None:
    settings, feed, cursor = PlanSettings.of(config), Feed(config, tmp_path / "tokens"), Cursor()
    ahead = PlanAhead(feed, settings)
    ahead.request(cursor)
    for _ in range(3):
        table, cursor = feed.step(cursor)
        planned = ahead.take()
        ahead.request(planned.after)
        expected = plan_step(table.length, settings)
        assert planned.plan.digest == expected.digest
        assert planned.balance == balance(expected, settings)
        assert np.array_equal(planned.table.length, table.length) and planned.after == cursor
    ahead.close()


def test_the_planning_process_imports_no_torch() -> None:
    """There is one for each rank: it must stay small."""
    code = "import sys, engine.trainer.planning; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) & {"torch", "deepspeed"} == set()
