from __future__ import annotations

import json
from pathlib import Path

import pytest

from bytescale_cli.main import run
from engine.config import tree
from tests.bytescale_cli.failures import failed


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    names = [line.split()[0] for line in lines if line and not line.startswith(" ")]
    assert sorted(name for name in names if name in tree.recipes()) == tree.recipes()
    assert lines.count("Planned and simulated only, never run on GPUs") == 1
    assert not any("run on" in line for line in lines if line.split()[:1] != ["Planned"])
    assert "quickstart" in names[:10], "those that have run are first"


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


def test_copy_then_list_show_and_use(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["recipes", "copy", "llama3-8b-64k-1node", "mine.yaml"]) == 0
    assert "--config mine.yaml" in capsys.readouterr().out
    text = Path("mine.yaml").read_text(encoding="utf-8")
    failed(capsys, ["recipes", "copy", "quickstart", "mine.yaml"], 2, "FILE")
    assert Path("mine.yaml").read_text(encoding="utf-8") == text

    assert run(["recipes", "show", "./mine.yaml"]) == 0
    assert capsys.readouterr().out == text
    Path("other.yml").write_bytes(b"# not UTF-8: \xfc\n")
    Path("notes.txt").touch()
    assert run(["recipes", "list", ".", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["recipes"]
    assert [one["name"] for one in listed] == ["mine.yaml", "other.yml"]
    assert listed[0]["about"].startswith("Continues the pre-training of Llama 3 8B")
    assert run(["estimate-memory", "--config", "mine.yaml"]) == 0


def test_a_copy_may_lie_in_another_folder(tmp_path: Path) -> None:
    file = tmp_path / "a b.yml"
    assert run(["recipes", "copy", "quickstart", str(file)]) == 0
    assert run(["config", "show", f"recipe={file}"]) == 0


@pytest.mark.parametrize(
    "command",
    ["train", "plan", "simulate", "estimate-memory", "profile-data", "profile-hardware", "data pack", "config show"],
)
def test_every_command_that_takes_a_recipe_takes_a_file(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """They compose it, and so find its mistake; the flag may stand beside the same path."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: quickstart\nrun:\n  stop: 5\n")
    for words in (
        [f"recipe={mine}"],
        ["--config", str(mine)],
        ["--config", str(mine), f"recipe={tmp_path}/./mine.yaml"],
    ):
        failed(capsys, [*command.split(), *words], 2, f"{mine}:3")
