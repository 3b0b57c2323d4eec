from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import plan_digests

pytestmark = pytest.mark.long


def test_plans_that_differ_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_digests.tree, "recipes", lambda: ["quickstart"])
    file = tmp_path / "digests.json"
    assert plan_digests.main("write", file) == 0
    assert plan_digests.main("compare", file) == 0
    found = json.loads(file.read_text())
    assert len(found) == len(plan_digests.MIXES) * len(plan_digests.SEEDS)
    first = next(iter(found))
    file.write_text(json.dumps(found | {first: "another"}))
    capsys.readouterr()
    assert plan_digests.main("compare", file) == 1
    assert capsys.readouterr().out.startswith(f"{first}: another -> ")
