"""What was prepared is read instead of planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import one_rank_1m, plans, prepared, train
from engine.config.load import load

pytestmark = pytest.mark.long


def test_prepared_steps_need_no_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "FOLDER", tmp_path)
    config = train.config_of(*train.TINY[0])
    drawn, steps = train.steps_of(config, write=True)
    modelled = one_rank_1m.modelled_step("qwen3-8b-1m-1node", write=True)
    for module in (plans, one_rank_1m):
        monkeypatch.setattr(module, "plan_step", lambda *arguments: 1 / 0)
    assert train.steps_of(config) == (drawn, steps)
    assert one_rank_1m.modelled_step("qwen3-8b-1m-1node") == modelled
    with pytest.raises(ZeroDivisionError):
        plans.planned(drawn, train.STEPS + 1)


def test_another_config_has_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "FOLDER", tmp_path)
    one, other = load(["recipe=quickstart"]), load(["recipe=quickstart", "run.seed=2"])
    assert prepared.prepared(one, "x", lambda: 1, write=True) == 1
    assert [prepared.prepared(config, "x", lambda: 2) for config in (one, other)] == [1, 2]
    assert prepared.prepared(one, "y", lambda: 3) == 3
