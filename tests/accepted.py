"""Golden files: texts that tests compare with what the code makes now. `pytest --accept` rewrites them instead."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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
    for name, text in found.items():
        accepted(folder / name, text)
    accepted_names(folder, found)


def accepted_names(folder: Path, names: Collection[str]) -> None:
    """Assert that a folder has no golden files but these, which tests compare one by one; with --accept, remove others.

    It tells what belongs to an entry that is no longer there, such as a planner.
    """
    others = [path for path in sorted(folder.glob("*")) if path.name not in names]
    if REWRITE:
        for path in others:
            path.unlink()
    else:
        assert not others, f"{folder.name} has files that nothing makes now; if this is meant: pytest --accept"
