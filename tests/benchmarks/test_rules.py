from __future__ import annotations

import sys

import pytest

from benchmarks import rules
from benchmarks.traces import draw, settings_of
from engine.planner.adaptive import free


def test_every_rule_is_left_out_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rules, "cases", lambda mode, seeds: [(settings_of("github", 8, mode), draw("github", 8, 8, 1))])
    for mode, count in (("free", len(free.RULES) + 3), ("lockstep", 2)):
        monkeypatch.setattr(sys, "argv", ["rules.py", "--mode", mode])
        rules.main()
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == count and all(line.endswith("% at most, 1 steps") for line in lines)


def test_steps_are_of_all_kinds() -> None:
    found = list(rules.cases("free", 1))
    assert len(found) == 3 * 5 * (2 + 3 + 3)
    assert {settings.ranks for settings, _ in found} == {8, 64, 512}
    assert {settings.offload > 0 for settings, _ in found} == {True, False}
    assert {int(settings.cluster.speed.min()) for settings, _ in found} == {100, 50}
