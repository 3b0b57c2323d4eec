from __future__ import annotations

import json

import pytest

from bytescale_cli.main import run
from engine.config import tree


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "list"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == tree.recipes()


def test_list_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    run(["recipes", "list", "--json"])
    found = json.loads(capsys.readouterr().out)["recipes"]
    assert [one["name"] for one in found] == tree.recipes()
    assert all(one["about"] for one in found)


def test_show_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "show", "quickstart"]) == 0
    text = capsys.readouterr().out
    assert text == (tree.folder() / "recipe" / "quickstart.yaml").read_text(encoding="utf-8")
    run(["recipes", "show", "quickstart", "--json"])
    assert json.loads(capsys.readouterr().out)["recipe"]["text"] == text
