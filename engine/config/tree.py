"""The recipes folder on disk: its groups and their options. Imports neither Hydra nor pydantic."""

from __future__ import annotations

from functools import cache
from importlib import resources
from itertools import takewhile
from pathlib import Path


def folder() -> Path:
    """Return the folder of the installed `recipes` package."""
    return Path(str(resources.files("recipes")))


@cache  # searches for a config that fits check thousands of them
def groups() -> dict[str, list[str]]:
    """Return the sorted options of each group: {"planner": ["adaptive", "balanced", ...], ...}.

    Callers must not modify it.
    """
    return {
        group.name: sorted(file.stem for file in group.glob("*.yaml"))
        for group in sorted(folder().iterdir())
        if any(group.glob("*.yaml"))
    }


def recipes() -> list[str]:
    """Return the sorted names of all recipes."""
    return groups()["recipe"]


def is_path(value: str) -> bool:
    """Whether a value of `recipe=` names a file and not a packaged recipe."""
    return "/" in value or value.startswith("~") or value.lower().endswith((".yaml", ".yml"))


def bases() -> list[str]:
    """Return the sorted names of the shared parts of recipes, as `defaults` names them: ["base/llama7b", ...]."""
    return sorted(f"base/{file.stem}" for file in (folder() / "recipe" / "base").glob("*.yaml"))


def text_of(group: str, option: str) -> str:
    """Return the text of an option's file."""
    return (folder() / group / f"{option}.yaml").read_text(encoding="utf-8")


def about(text: str) -> str:
    """Return the comment at the top of a recipe or an option as one line, without Hydra's `@package`."""
    top = takewhile(lambda line: line.startswith("#"), text.splitlines())
    return " ".join(line[1:].strip() for line in top if "@package" not in line)
