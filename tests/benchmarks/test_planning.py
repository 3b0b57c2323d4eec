from __future__ import annotations

import pytest

from benchmarks import planning
from engine.planner.planners import PLANNERS
from tests.benchmarks.rows import measured

pytestmark = pytest.mark.long


def test_all_planners_and_traces_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "first_plan", lambda: 0.5)
    found = measured(planning, "--sizes", "8/32", "--seeds", "1")
    assert [(row["planner"], row["trace"]) for row in found["rows"]] == [
        (planner, trace) for planner in PLANNERS for trace in planning.TRACES
    ]
    assert found["summary"] == {"first_plan_s": 0.5, "over_others": planning.over_others(found["rows"])}
