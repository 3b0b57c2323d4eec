"""The recipes' folder as it lies on disk: its groups and their options. Needs neither Hydra nor pydantic."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def folder() -> Path:
    """Return the folder of the installed `recipes` package."""
    return Path(str(resources.files("recipes")))


def groups() -> dict[str, list[str]]:
    """Return the options of each group, sorted: {"planner": ["balanced", "naive", "static"], ...}."""
    return {
        group.name: sorted(file.stem for file in group.glob("*.yaml"))
        for group in sorted(folder().iterdir())
        if any(group.glob("*.yaml"))
    }


def recipes() -> list[str]:
    """Return the names of the recipes, sorted."""
    return groups()["recipe"]


def about(group: str, option: str) -> str:
    """Return what an option's file says of itself: the comment at its top."""
    lines = (folder() / group / f"{option}.yaml").read_text(encoding="utf-8").splitlines()
    comment = [line[1:].strip() for line in lines if line.startswith("#") and "@package" not in line]
    return " ".join(comment)
