from __future__ import annotations

import pytest

from benchmarks import rules
from benchmarks.traces import draw, settings_of
from engine.planner.adaptive import free
from tests.benchmarks.rows import measured

pytestmark = pytest.mark.long


def test_every_rule_is_left_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "steps", lambda mode, seeds: [(settings_of("github", 8, mode), draw("github", 8, 8, 1))])
    found = measured(rules, "--mode", "free")["rows"]
    assert len({row["rule"] for row in found}) == len(found) == len(free.RULES) + 3
    assert all(row["steps"] == 1 and row["mean_%"] == pytest.approx(row["most_%"]) for row in found)
