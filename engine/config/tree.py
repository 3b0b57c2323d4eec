"""The recipes folder on disk: its groups and their options. Imports neither Hydra nor pydantic."""

from __future__ import annotations

from importlib import resources
from itertools import takewhile
from pathlib import Path


def folder() -> Path:
    """Return the folder of the installed `recipes` package."""
    return Path(str(resources.files("recipes")))


def groups() -> dict[str, list[str]]:
    """Return the sorted options of each group: {"planner": ["adaptive", "balanced", ...], ...}."""
    return {
        group.name: sorted(file.stem for file in group.glob("*.yaml"))
        for group in sorted(folder().iterdir())
        if any(group.glob("*.yaml"))
    }


def recipes() -> list[str]:
    """Return the sorted names of all recipes."""
    return groups()["recipe"]


def about(group: str, option: str) -> str:
    """Return the comment at the top of an option's file as one line, without Hydra's `@package`."""
    lines = (folder() / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    top = takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line[1:].strip() for line in top if "@package" not in line)
