from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks import planning
from benchmarks.traces import compute_only, draw, settings_of
from engine.planner.plan.emit import emit
from engine.planner.planners import PLANNERS
from tests.benchmarks.rows import measured

pytestmark = pytest.mark.long


def test_a_row_holds_what_was_measured() -> None:
    row = planning.row("adaptive", "github", 8, 32, 2, "free")
    assert (row["planner"], row["trace"], row["ranks"], row["sequences"]) == ("adaptive", "github", 8, 32)
    assert row["ms"] > 0 and len(row["makespans_s"]) == 2 and min(row["makespans_s"]) > 0
    assert 0.9 < row["balance_worst"] <= row["balance"] <= 1
    assert 1 - 1e-4 <= row["over_bound"] <= row["over_bound_worst"]


def test_slots_are_over_the_least_number() -> None:
    assert planning.row("adaptive", "lognormal", 8, 32, 1, "lockstep")["slots"] >= 1


def test_all_planners_and_traces_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "first_plan", lambda: 0.5)
    found = measured(planning, "--sizes", "8/32", "--seeds", "1")
    assert [(row["planner"], row["trace"]) for row in found["rows"]] == [
        (planner, trace) for planner in PLANNERS for trace in planning.TRACES
    ]
    assert found["summary"] == {"first_plan_s": 0.5, "over_others": planning.over_others(found["rows"])}


def cell(planner: str, trace: str, *makespans: float) -> dict[str, Any]:
    return {"planner": planner, "trace": trace, "ranks": 8, "sequences": 32, "makespans_s": list(makespans)}


def test_ours_is_compared_step_by_step_with_the_best_of_the_others() -> None:
    rows = [cell("static", "github", 2.0, 8.0), cell("naive", "github", 4.0, 1.0), cell("adaptive", "github", 1.0, 1.5)]
    assert planning.over_others(rows) == 1.5
    assert planning.over_others([*rows, cell("adaptive", "byted", 9.0)]) == 1.5, "nothing to compare with"
    assert planning.over_others(rows[2:]) is None


def test_hops_by_hand() -> None:
    """Two sequences of 3 capacities need 3 ranks each; on 4 they make 3 hops a token instead of 2."""
    settings = compute_only(settings_of("lognormal", 8))
    lengths = np.array([3 * settings.capacity] * 2)
    four = emit("by hand", "free", 8, settings.capacity, lengths, [[(0, range(4))], [(1, range(4, 8))]])
    assert planning.hops(four, settings) == 1.0, "of equal work each rank has a quarter: four are needed"
    short = draw("lognormal", 8, 400, seed=0)
    more = np.append(lengths, short[short <= settings.capacity])
    alone = [[(at, (at % 8,))] for at in range(2, len(more))]
    more_plan = emit("by hand", "free", 8, settings.capacity, more, [[(0, range(4))], [(1, range(4, 8))], *alone])
    assert planning.hops(more_plan, settings) == pytest.approx(3 / 2)


def test_means() -> None:
    assert planning.geometric(np.array([1.0, 4.0])) == 2.0
