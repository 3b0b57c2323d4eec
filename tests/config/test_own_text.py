"""A copied recipe is the same config under the file's name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from engine.config import keys, tree
from engine.config.load import load
from engine.config.own_text import own_copy
from engine.config.units import format_count


def form(name: str) -> str:
    """The base of a recipe and the keys that it sets itself."""
    own = yaml.safe_load(tree.text_of("recipe", name))
    return f"{own['defaults'][0]} {sorted(own)}"


FORMS = {form(name): name for name in tree.recipes()}
EACH = [pytest.param(name, marks=[] if name in FORMS.values() else [pytest.mark.slow]) for name in tree.recipes()]


@pytest.mark.parametrize("name", EACH)
def test_every_recipe(name: str, tmp_path: Path) -> None:
    file = tmp_path / "my copy.yaml"
    text = own_copy(name, file)
    file.write_text(text, encoding="utf-8")
    copy, original = load([f"recipe={file}"]), load([f"recipe={name}"])
    assert (copy.recipe, copy.run.out) == ("my copy", "runs/my copy")
    run = copy.run.model_copy(update={"out": original.run.out})
    assert copy.model_copy(update={"recipe": name, "run": run}) == original


def test_what_a_user_needs_to_start() -> None:
    text = own_copy("llama3-8b-1m-16nodes", Path("a b.yaml"))
    assert tree.about(text).startswith(tree.about(tree.text_of("recipe", "llama3-8b-1m-16nodes")))
    assert "bytescale train --config 'a b.yaml'" in text
    capacity = format_count(load(["recipe=llama3-8b-1m-16nodes"]).capacity)
    assert f"# {keys.leaves()['capacity'].description}\ncapacity: {capacity}\n" in text
    assert "base/" not in text
    quickstart, llama = (own_copy(name, Path("a.yaml")) for name in ("quickstart", "llama7b-256k"))
    assert "# data:\n" in quickstart and "# data:\n" in llama, "what stands for documents of one's own"
    assert (
        "# For other documents make the entry of `override /data` in `defaults`: `- override /data: jsonl`"
        in quickstart
    )
    assert "/lengths" not in quickstart and "remove `override /lengths`" in llama and "add to `defaults`" in llama
