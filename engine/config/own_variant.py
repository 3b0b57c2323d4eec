"""A config as the text of a recipe file that builds on the recipe that the config came from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.config import keys, tree
from engine.config.load import load
from engine.config.own_copy import body, comment
from engine.config.schema import Config
from engine.errors import ConfigError

_MISSING = object()


def own_variant(base: str, config: Config, file: Path, comments: Sequence[str]) -> str:
    """Write `config` as the text of `file`: its `defaults` name `base`, and below are the values that differ from it.

    `base` is a packaged recipe, or the path of a file of the user's own. `comments` are paragraphs at the top. The name
    of the recipe, and a run folder of this name, are left out, so that they are named after the file.
    """
    below: dict[str, Any] = {}
    with suppress(ConfigError):  # the base alone may lack values that the user set: then all values are written
        below = _values(load([f"recipe={base}"]))
    nested: dict[str, Any] = {}
    named_after = {"recipe", *(["run.out"] if config.run.out == f"runs/{config.recipe}" else [])}
    for key, value in _values(config).items():
        if key not in named_after and value != below.get(key, _MISSING):
            *sections, name = key.split(".")
            inner = nested
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = value
    if tree.is_path(base):
        base = f"./{os.path.relpath(Path(base).expanduser().resolve(), file.resolve().parent)}"
    lines = [line for text in comments for line in comment(text)]
    return "\n".join([*lines, "", "defaults:", f"  - {base}", "", *body(nested)]) + "\n"


def _values(config: Config) -> dict[str, Any]:
    """All values of a config, by dotted key."""
    dumped, found = config.model_dump(mode="json"), {}
    for key in keys.leaves():
        value: Any = dumped
        for part in key.split("."):
            value = value[part]
        found[key] = value
    return found
