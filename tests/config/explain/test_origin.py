"""Each value has the place that set it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import tree
from engine.config.explain.origin import COMMAND_LINE, origins
from engine.config.load import load
from engine.config.resolved import flat


@pytest.mark.parametrize("name", ["quickstart", "llama70b-2m-paper", "mixtral8x7b-sft-32k-4nodes"])
def test_every_key_of_a_packaged_recipe_stands_on_the_line_that_is_told(name: str) -> None:
    places = origins([f"recipe={name}"])
    values = flat(load([f"recipe={name}"]).model_dump(mode="json"))
    assert places.keys() == {*values, "data.sources"}, "it is empty, so `flat` leaves it out"
    for key, place in places.items():
        path, _, line = place.rpartition(":")
        text = (tree.folder().parent / path).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        assert text.strip().startswith(f"{key.rpartition('.')[2]}:"), place


def test_the_last_that_sets_a_key_is_its_origin(tmp_path: Path) -> None:
    base, mine = tmp_path / "base.yaml", tmp_path / "mine.yaml"
    base.write_text("defaults: llama7b-2m\nrun:\n  seed: 1\n  steps: 1\n")
    mine.write_text("defaults: [base.yaml]\nrun:\n  steps: 2\n")
    places = origins([f"recipe={mine}", "run.validate_every=5", "optimizer=sgd"])
    assert places["run.steps"] == f"{mine}:3"
    assert places["run.seed"] == f"{base}:3"
    assert places["context"].startswith("recipes/recipe/llama7b-2m.yaml:")
    assert places["capacity"].startswith("recipes/recipe/base/llama7b.yaml:")
    assert places["optimizer.eps"].startswith("recipes/optimizer/sgd.yaml:")
    assert places["compile"].startswith("recipes/config.yaml:")
    assert places["model.rope.kind"].startswith("recipes/model/rope/none.yaml:")
    assert places["run.validate_every"] == COMMAND_LINE


def test_keys_of_sources_have_places(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("data:\n  sources:\n    web: {path: a}\n    code:\n      path: b\n  mix: {web: 1, code: 1}\n")
    places = origins([f"recipe={mine}", "data.sources.code.path=c"])
    assert places["data.sources.web.path"] == f"{mine}:3"
    assert places["data.sources.code.path"] == COMMAND_LINE
    assert places["lengths.name"] == f"{COMMAND_LINE} (data.sources.code.path)"
