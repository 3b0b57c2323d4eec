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


def test_origin(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: quickstart\nrun:\n  seed: 5\n")
    assert run(["config", "show", "--config", str(mine), "--origin", "run.steps=7"]) == 0
    rows = {line.split()[0]: line.split(maxsplit=1)[1].split("  ") for line in capsys.readouterr().out.splitlines()}
    assert [cell.strip() for cell in rows["run.seed"] if cell] == ["5", f"{mine}:3"]
    assert [cell.strip() for cell in rows["run.steps"] if cell] == ["7", "command line"]
    run(["config", "show", "--config", str(mine), "--origin", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["origin"]["run.seed"] == f"{mine}:3"
    assert answer["config"]["run"]["seed"] == 5


def test_origins_of_sources(capsys: pytest.CaptureFixture[str]) -> None:
    sources = ["data.sources.web.path=a", "data.mix={web: 1}"]
    assert run(["config", "show", "recipe=llama7b-256k", "--origin", *sources]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["data.sources.web.path"].split(maxsplit=1)[1] == "command line"
    assert rows["lengths.name"].split(maxsplit=1) == ['"data"', "command line (data.sources.web.path)"]


def test_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert run(["config", "schema", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "ok": True, "config_schema": schema}


def test_help_for_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "help", "context"]) == 0
    name, about, kind, default = capsys.readouterr().out.splitlines()
    assert (name, about.strip()) == ("context", "maximum length of a sequence; longer documents are split")
    assert kind.strip() == "whole number of tokens, at least 1, at most 4G"
    assert default.startswith("  default in the quickstart: 2K, set by recipes/recipe/quickstart.yaml:")
    assert run(["config", "help", "context", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] and answer["help"]["keys"][0]["default"] == 2048


@pytest.mark.parametrize(
    ("key", "example"),
    [
        ("slurm.extra", "'slurm.extra=[\"--mem=0\"]'"),
        ("data.mix", "'data.mix={web: 3, code: 1}'"),
        ("run.trackers", "run.trackers=[tensorboard,wandb]"),
    ],
)
def test_help_shows_how_a_list_or_a_mapping_is_typed(
    key: str, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "help", key]) == 0
    assert f"\n  for example {example}\n" in capsys.readouterr().out


def test_help_for_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "help", "planner"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("planner: The assignment of sequences to ranks.\n\noption ")
    assert "\nplanner=static  " in text and "\nplanner.max_peers\n" in text


def test_help_names_all_sections_and_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "help"]) == 0
    text = capsys.readouterr().out
    assert "\noptimizer  The update rule" in text and "\nmemory     sets several keys: memory=zero1|" in text
    assert run(["config", "help", "optimzer"]) == 2
    assert capsys.readouterr().err == "error: optimzer: unknown key\nhint: did you mean optimizer?\n"
