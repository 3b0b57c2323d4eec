"""Lists the checkpoints of a run, and chooses the one to resume from. The launcher uses it, so it imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.run.checkpoints import DAMAGED, MANIFEST, PREFIX, START_OVER, check_sizes, newest_first, read, read_state
from engine.run.folder import RunFolder


def find(source: Path) -> Path:
    """Return `source` if it is a checkpoint, else the newest checkpoint of the run `source`; does not check its files.

    Raises CheckpointError if there is none.
    """
    if (source / MANIFEST).exists():
        return source
    found = newest_first(RunFolder(source).checkpoints)
    if not found:
        hint = "choose a run folder, or one of its checkpoints: RUN/checkpoints/step-..."
        raise CheckpointError("is neither a checkpoint nor a run that has one", key=str(source), hint=hint)
    return found[0]


def choose(checkpoints: Path, say: Callable[[str], None]) -> Path | None:
    """Return the newest intact checkpoint, or None if there are no checkpoints at all. Changes nothing on disk.

    Raises CheckpointError if every checkpoint is damaged: starting over silently would hide the loss.
    """
    damaged: list[tuple[str, str]] = []
    for folder in newest_first(checkpoints):
        try:
            read(folder)
        except CheckpointError as error:
            damaged.append((folder.name, str(error).removeprefix(DAMAGED)))
        else:
            if damaged:
                named = ", ".join(f"{name} is damaged ({reason})" for name, reason in damaged)
                say(f"warning: {named}; using {folder.name} instead")
            return folder
    if damaged:
        name, reason = damaged[0]
        older = ", as are all older ones" if len(damaged) > 1 else ""
        message = f"no intact checkpoint: {name} is damaged ({reason}){older}"
        raise CheckpointError(message, key=str(checkpoints), hint=START_OVER)
    return None


def verified(source: Path, say: Callable[[str], None]) -> Path:
    """Return `source` if it is a checkpoint, else the newest intact checkpoint of the run `source`.

    All hashes are checked. Raises CheckpointError if the checkpoint is damaged, or if the run has no intact one.
    """
    found = find(source)
    if found != source:
        return choose(found.parent, say) or found
    read(found)
    return found


def listed(run: Path) -> list[dict[str, Any]]:
    """Return path, step, ranks, bytes and damage of each checkpoint of a run, newest first.

    `damaged` is the damage that a comparison of file sizes shows, or None. Hashes are not checked: that would take
    minutes. `ranks` is None if the manifest cannot be read. Raises CheckpointError if there is no checkpoint, and
    PermissionError if this user may read none of them.
    """
    rows, forbidden = [], list[PermissionError]()
    for folder in newest_first(find(run).parent):
        digits = folder.name.removeprefix(PREFIX)
        step, ranks, damaged = int(digits) if digits.isdecimal() else None, None, None
        try:
            state = read_state(folder)
            step, ranks = state.step, state.ranks
            check_sizes(folder)
        except CheckpointError as error:
            damaged = str(error).removeprefix(DAMAGED)
        except PermissionError as error:  # must not hide the others
            damaged = f"{Path(error.filename).name} may not be read"
            forbidden.append(error)
        rows.append({"path": str(folder), "step": step, "ranks": ranks, "bytes": _bytes(folder), "damaged": damaged})
    if len(forbidden) == len(rows):
        raise forbidden[0]
    return rows


def _bytes(folder: Path) -> int:
    """The bytes of all files in a folder that can be seen."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += Path(place, name).stat().st_size
    return total
