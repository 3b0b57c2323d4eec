"""Documents that are named without a recipe are planned for a context and a cluster that suit them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bytescale_cli.main import run
from engine.config.load import load
from engine.data.scale import _RECIPES, is_without_recipe, scaled


def lines(path: Path, *lengths: int) -> list[str]:
    """Write texts of so many bytes; return the overrides that name them."""
    path.write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in lengths))
    return ["data=jsonl", f"data.path={path}"]


@pytest.mark.parametrize(
    ("longest", "context", "nodes"),
    [(10, 1 << 10, 1), (5000, 8 << 10, 1), (65_535, 64 << 10, 1), (65_536, 128 << 10, 2), (1_500_000, 1 << 20, 16)],
)
def test_context_and_cluster_follow_the_longest_document(
    longest: int, context: int, nodes: int, tmp_path: Path
) -> None:
    said = list[str]()
    config, found = scaled(lines(tmp_path / "a", longest, 5), say=said.append)
    assert (config.context, config.cluster.nodes, config.cluster.name) == (context, nodes, "h100x8")
    assert config.lengths.name == "data" and config.data.tokenizer == "bytes"
    assert found["data"].lengths.max() == longest + 1
    assert "bytes" in said[0] and config.recipe in said[-1]  # a warning that bytes are counted, and what was chosen


def test_recipes_hold_their_contexts() -> None:
    assert all(load([f"recipe={name}"]).context == context for context, name in _RECIPES)


def test_what_is_set_stays(tmp_path: Path) -> None:
    own = lines(tmp_path / "a", 10_000)
    assert is_without_recipe(own)
    for more in (
        "recipe=quickstart",
        "cluster=local",
        "cluster.nodes=2",
        "model=tiny",
        "lengths=github",
        "model.layers=3",
    ):
        assert not is_without_recipe([*own, more])
    assert not is_without_recipe(["data.path=stdlib"]) and not is_without_recipe([])
    config, _ = scaled([*own, "context=100K", "capacity=4K"])
    assert (config.context, config.capacity, config.cluster.nodes) == (100 << 10, 4 << 10, 2)


@pytest.mark.parametrize("command", ["plan", "profile-data"])
def test_commands_do_not_answer_for_the_quickstart(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = lines(tmp_path / "a", *[3000] * 20)
    assert run([command, own[1], "batch_tokens=16K", f"data.cache={tmp_path}/cache", "--json"]) == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    found = (answer["data"] if command == "profile-data" else answer)["for"]
    assert (found["context"], found["cluster"], found["nodes"]) == (4096, "h100x8", 1)
    assert "context=4K" in shown.err and "data=jsonl" in shown.err and "are bytes" in shown.err
    assert shown.err.count("are bytes") == 1
