"""The golden texts of the recipes, which show a change of them as a small diff.

quickstart.yaml is a complete resolved config. Every other file is for the recipes with one base, and has the values
that differ from the quickstart: first those that `all` its recipes share, then those of each recipe. So a changed
default changes only quickstart.yaml, and a changed base only the file of its recipes.
"""

from __future__ import annotations

from typing import Any

import yaml

from engine.config import tree
from engine.config.load import load, resolved_yaml
from engine.config.resolved import flat


def family(name: str) -> str:
    """The base that a recipe's defaults name: llama7b for llama7b-2m."""
    defaults = yaml.safe_load((tree.folder() / "recipe" / f"{name}.yaml").read_text(encoding="utf-8"))["defaults"]
    return str(defaults[0]).removeprefix("base/")


def golden_texts() -> dict[str, str]:
    """The text of each golden file, by its name in golden/."""
    values = {name: flat(load([f"recipe={name}"]).model_dump(mode="json")) for name in tree.recipes()}
    quickstart = values.pop("quickstart")
    changed: dict[str, dict[str, dict[str, Any]]] = {}
    for name, own in values.items():
        members = changed.setdefault(family(name), {})
        members[name] = {key: value for key, value in own.items() if value != quickstart.get(key)}
    texts = {"quickstart.yaml": resolved_yaml(load(["recipe=quickstart"]))}
    for base, members in changed.items():
        first, *others = members.values()
        shared = {k: v for k, v in first.items() if all(k in other and other[k] == v for other in others)}
        rest = {name: {key: value for key, value in own.items() if key not in shared} for name, own in members.items()}
        texts[f"{base}.yaml"] = yaml.safe_dump({"all": shared, **rest}, sort_keys=False, allow_unicode=True)
    return texts
