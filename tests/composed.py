"""Hydra's compositions and checked overrides, kept in a folder for a session of tests and the ranks of its worlds.

Together they take a tenth of a second or more, and the tests ask thousands of times, mostly for the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import engine.config.compose
import engine.config.overrides
from engine.config.compose import compose
from engine.config.overrides import check
from engine.config.own import OwnRecipe
from engine.errors import Problem

FOLDER = "BYTESCALE_TESTS"  # the environment variable that names the folder of a session of tests


def kept(folder: Path) -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """Return what replaces `compose` and `check`: module, name and function. They return results kept in the folder.

    Mistakes are not kept.
    """

    def composed(overrides: Sequence[str], own: Sequence[OwnRecipe] = ()) -> dict[str, Any]:
        if own or any("oc.env" in text for text in overrides):  # the overrides are not all it depends on
            return compose(overrides, own)
        return _kept(folder, "composed", overrides, lambda: (compose(overrides), True))

    def checked(texts: Sequence[str]) -> tuple[list[str], list[Problem]]:
        def ask() -> tuple[tuple[list[str], list[Problem]], bool]:
            found = check(texts)
            return found, not found[1]

        return ask()[0] if any("~" in text for text in texts) else _kept(folder, "checked", texts, ask)

    return [(engine.config.compose, "compose", composed), (engine.config.overrides, "check", checked)]


def _kept(folder: Path, kind: str, texts: Sequence[str], ask: Callable[[], tuple[Any, bool]]) -> Any:
    """Return what is kept for these texts, or the first result of `ask`, which also says whether to keep it."""
    with (folder / hashlib.sha256(repr((kind, list(texts))).encode()).hexdigest()).open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the ranks of a world ask for the same at the same time
        file.seek(0)
        if found := file.read():
            return pickle.loads(found)
        result, keep = ask()
        if keep:
            file.write(pickle.dumps(result))
    return result
