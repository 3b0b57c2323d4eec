from __future__ import annotations

import math
from pathlib import Path

import pytest

from engine.errors import ExitCode
from engine.trainer.finite import DivergedError, check_finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_ends_the_run_and_the_way_out_is_told(tmp_path: Path, bad: float) -> None:
    check_finite(1, tmp_path, loss=2.5, grad_norm=1e30)
    with pytest.raises(DivergedError, match=f"step 7: loss 2.5, grad_norm {bad}") as caught:
        check_finite(7, tmp_path, loss=2.5, grad_norm=bad)
    (problem,) = caught.value.problems
    assert (problem.key, problem.hint) == ("optimizer.lr", "lower it and start again: run.out=NEW")
    assert caught.value.code == ExitCode.USAGE, "never retried"


def test_the_last_checkpoint_is_named(tmp_path: Path) -> None:
    for step in (3, 6):
        (tmp_path / "a run" / f"step-0000000{step}").mkdir(parents=True)
    with pytest.raises(DivergedError) as caught:
        check_finite(7, tmp_path / "a run", loss=math.nan)
    assert str(caught.value.problems[0].hint).endswith(f"--resume '{tmp_path}/a run/step-00000006'")
