from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest

from engine.errors import ExitCode
from engine.run.folder import RunFolder
from engine.trainer.finite import diverged, documents_of
from tests.helpers import table_of
from tests.planner.samples import by_hand


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_shown_with_the_way_out(tmp_path: Path, bad: float) -> None:
    error = diverged(7, RunFolder(tmp_path), ", in the gradients", loss=2.5, grad_norm=bad)
    (problem,) = error.problems
    assert problem.message == f"training diverged at step 7: loss 2.5, grad_norm {bad}, in the gradients"
    assert (problem.key, problem.hint) == (
        "optimizer.lr",
        "lower it and start again: run.out=NEW; or skip such steps: run.on_nan=skip",
    )
    assert error.code == ExitCode.USAGE, "never retried"


def test_the_last_checkpoint_is_named(tmp_path: Path) -> None:
    for step in (3, 6):
        (tmp_path / "a run" / "checkpoints" / f"step-0000000{step}").mkdir(parents=True)
    error = diverged(7, RunFolder(tmp_path / "a run"), loss=math.nan)
    assert f"--resume '{tmp_path}/a run/checkpoints/step-00000006'" in str(error.problems[0].hint)


def test_the_documents_whose_loss_is_not_finite_are_named() -> None:
    """Those of the step, if no loss is to blame."""
    plan = by_hand([30, 20, 40, 10], [(0, 1), (1,), (1,), (0,)], [[[0], [3]], [[0], [1, 2]]])
    table, _ = table_of([30, 20, 40, 10], seed=0)
    named = partial(documents_of, plan, table, ["web"])
    assert named([1]) == ", in 1 of 4 micro-batches; documents web:0:3"
    assert named([3, 3, 1]) == ", in 2 of 4 micro-batches; documents web:0:1, web:0:2, web:0:3"
    assert named([]) == ", in the gradients alone; documents web:0:0, web:0:1, web:0:2 and 1 more"
