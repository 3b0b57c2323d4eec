"""Recipes are golden: a changed default shows as a diff in review.

To accept a change: `bytescale config show recipe=NAME > tests/recipes/golden/NAME.yaml`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import tree
from engine.config.load import load, resolved_yaml
from engine.config.resolved import read_resolved

GOLDEN = Path(__file__).parent / "golden"
PROMISED = {"recipe", "model", "data", "cluster", "planner", "optimizer", "lengths"}


@pytest.mark.parametrize("name", tree.recipes())
def test_golden(name: str) -> None:
    assert resolved_yaml(load([f"recipe={name}"])) == (GOLDEN / f"{name}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", tree.recipes())
def test_golden_texts_read_back(name: str) -> None:
    assert read_resolved(GOLDEN / f"{name}.yaml") == load([f"recipe={name}"])


def test_no_golden_text_is_left_over() -> None:
    assert sorted(path.stem for path in GOLDEN.iterdir()) == tree.recipes()


def test_promised_groups() -> None:
    assert set(tree.groups()) == PROMISED


@pytest.mark.parametrize(("group", "option"), [(g, o) for g, options in tree.groups().items() for o in options])
def test_every_file_says_what_it_is_and_loads(group: str, option: str) -> None:
    assert tree.about(group, option)
    needs_path = ["data.path=somewhere"] if (group, option) in {("data", "folder"), ("data", "jsonl")} else []
    needs_path += ["lengths.path=somewhere"] if (group, option) == ("lengths", "file") else []
    config = load([f"{group}={option}", *needs_path])
    chosen = getattr(config, group)
    assert (chosen if group == "recipe" else chosen.name) == option


def test_the_7b_shape_is_the_papers() -> None:
    """ByteScale, evaluation: layers 32, heads 32, KV groups 8, hidden 4096."""
    model = load(["model=llama7b"]).model
    assert (model.layers, model.heads, model.kv_heads, model.hidden) == (32, 32, 8, 4096)
