"""Leaves drafts as a killed process does."""

from __future__ import annotations

from pathlib import Path

from engine.folders import Draft, opened


def ruin(final: Path, verb: str = "writing") -> Path:
    """Leave a draft of the folder `final`, or what is left of its removal; return its path."""
    with opened(final.parent, make=True) as parent:
        draft = Draft.new(parent, final.name, verb)
        (draft.path / "a.pt").write_bytes(b"a")
        draft.close()
        return draft.place
