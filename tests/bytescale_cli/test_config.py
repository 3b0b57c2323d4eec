from __future__ import annotations

import json
from pathlib import Path

import pytest

from bytescale_cli.main import run
from engine.config.load import load
from engine.config.resolved import read_resolved


def test_show_prints_what_reads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["config", "show", "run.steps=7"]) == 0
    path = tmp_path / "resolved.yaml"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert read_resolved(path) == load(["run.steps=7"])


def test_show_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", "run.steps=7", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["ok"]) == (1, True)
    assert answer["config"] == load(["run.steps=7"]).model_dump(mode="json")
