"""The checkpoints that there are: a list of them, and the one to go on from. No torch here: the launcher chooses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.config.units import counted
from engine.errors import CheckpointError
from engine.trainer.checkpoint import ANEW, DAMAGED, MANIFEST, PREFIX, check_sizes, newest_first, read, read_state
from engine.trainer.folder import RunFolder


def find(source: Path) -> Path:
    """Return the checkpoint that a path names: itself, or the newest of a run. Raises CheckpointError without one."""
    if (source / MANIFEST).exists():
        return source
    found = newest_first(RunFolder(source).checkpoints)
    if not found:
        hint = "name a run folder, or one of its checkpoints: RUN/checkpoints/step-..."
        raise CheckpointError("is neither a run with a checkpoint nor a checkpoint", key=str(source), hint=hint)
    return found[0]


def choose(checkpoints: Path, say: Callable[[str], None]) -> Path | None:
    """Return the newest valid checkpoint, or None if there is none at all. Nothing is changed: `abandon` does that.

    Raises CheckpointError when there are checkpoints and all are damaged: to start over then would hide the loss.
    """
    broken = []
    for folder in newest_first(checkpoints):
        try:
            read(folder)
        except CheckpointError as error:
            broken.append(f"{error} ({folder})")
        else:
            for damage in broken:
                say(f"{damage}; the one before is used")
            return folder
    if broken:
        message = f"none of {counted(len(broken), 'checkpoint')} is whole; the newest: {broken[0]}"
        raise CheckpointError(message, key=str(checkpoints), hint=ANEW)
    return None


def verified(source: Path, say: Callable[[str], None]) -> Path:
    """Return the checkpoint that a path names, every byte of it checked: itself, or the newest whole one of a run."""
    found = find(source)
    if found != source:
        return choose(found.parent, say) or found
    read(found)
    return found


def listed(run: Path) -> list[dict[str, Any]]:
    """Return the path, step, ranks and bytes of a run's checkpoints, newest first.

    `damaged` says what is wrong with one as far as sizes show it, or is None; hashes are not checked, nor are the
    sizes of what was written before manifests held them.
    """
    return [_listed(folder) for folder in newest_first(find(run).parent)]


def _listed(folder: Path) -> dict[str, Any]:
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    name = folder.name.removeprefix(PREFIX)
    step, ranks, damaged = int(name) if name.isdecimal() else None, None, None
    try:
        state = read_state(folder)
        step, ranks = state.step, state.ranks
        check_sizes(folder)
    except CheckpointError as error:
        damaged = str(error).removeprefix(DAMAGED)
    return {"path": str(folder), "step": step, "ranks": ranks, "bytes": size, "damaged": damaged}
