"""Golden files: texts that tests compare with what the code makes now. `pytest --accept` rewrites them instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

REWRITE = False  # conftest.py sets it: whether pytest was given --accept


def accepted(path: Path, found: str) -> None:
    """Assert that a golden file has the text that was found; with --accept, write the text."""
    if REWRITE:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found, encoding="utf-8")
    golden = path.read_text(encoding="utf-8") if path.exists() else ""
    assert found == golden, f"{path.name} has another text; if the change is meant: pytest --accept"


def accepted_folder(folder: Path, found: Mapping[str, str]) -> None:
    """Assert that a folder has exactly these golden files, by name; with --accept, write them and remove others."""
    for old in folder.iterdir():
        if REWRITE and old.name not in found:
            old.unlink()
    for name, text in found.items():
        accepted(folder / name, text)
    assert sorted(found) == sorted(path.name for path in folder.iterdir())
