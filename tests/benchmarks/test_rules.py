from __future__ import annotations

import pytest

from benchmarks import rules
from benchmarks.traces import draw, settings_of
from engine.planner.adaptive import free
from tests.benchmarks.rows import measured

pytestmark = pytest.mark.long


def test_every_rule_is_left_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "steps", lambda mode, seeds: [(settings_of("github", 8, mode), draw("github", 8, 8, 1))])
    for mode, count in (("free", len(free.RULES) + 3), ("lockstep", 2)):
        found = measured(rules, "--mode", mode)["rows"]
        assert len({row["rule"] for row in found}) == len(found) == count
        assert all(row["steps"] == 1 and row["mean_%"] == pytest.approx(row["most_%"]) for row in found)


def test_steps_are_of_all_kinds() -> None:
    found = list(rules.steps("free", 1))
    assert len(found) == 3 * 5 * (2 + 3 + 3)
    assert {settings.ranks for settings, _ in found} == {8, 64, 512}
    assert {settings.offload > 0 for settings, _ in found} == {True, False}
    assert {int(settings.cluster.speed.min()) for settings, _ in found} == {100, 50}
