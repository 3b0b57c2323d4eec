"""Checkpoints that are whole or not there: a temporary folder, a manifest of hashes, fsync, rename.

A flipped bit loads silently in every checkpoint format (40 of 40 when tried), and a kill during an overwrite
leaves ruins. So a checkpoint is written beside its place and renamed when all its bytes are on disk, and read only
after its hashes have been checked. No torch here: the launcher chooses the checkpoint before any rank starts.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.config.units import counted
from engine.errors import CheckpointError
from engine.files import sync
from engine.trainer.folder import write_json

MANIFEST = "manifest.json"
PREFIX = "step-"
_WRITING = ".writing-"
_REMOVING = ".removing-"
DAMAGED = "checkpoint is damaged: "
ANEW = "train --resume never starts over and keeps the old run beside the new one"


@dataclass(frozen=True)
class TrainState:
    """What a run needs beside the tensors: plain data, of the last *finished* step."""

    step: int
    epoch: int
    position: int
    ranks: int
    fingerprint: str  # of the documents
    lineage: dict[str, Any]  # the values of the config that must not change, see lineage.py


def folder_name(step: int) -> str:
    """Return a checkpoint's name."""
    return f"{PREFIX}{step:08d}"


def newest_first(checkpoints: Path) -> list[Path]:
    """Return the finished checkpoints, newest first. Unfinished ones have another name and are not listed."""
    return sorted((p for p in checkpoints.glob(f"{PREFIX}*") if p.is_dir()), key=lambda p: p.name, reverse=True)


def write(
    checkpoints: Path,
    state: TrainState,
    rank: int,
    save_tensors: Callable[[Path], None],
    gather: Callable[[dict[str, Any]], list[dict[str, Any]]],
) -> Path:
    """Write one checkpoint together; all ranks call it and share a file system.

    `save_tensors(folder)` writes the rank's files; `gather(facts)` waits for all ranks and returns theirs on
    each. Each rank hashes, measures and syncs its share of the files.
    """
    final = checkpoints / folder_name(state.step)
    draft = checkpoints / f"{_WRITING}{final.name}"
    if rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    gather({})
    save_tensors(draft)
    gather({})
    files = sorted(gather(_files(draft) if rank == 0 else {})[0])  # one list for all: views of a shared folder may lag
    facts = {name: (_hash_and_sync(draft / name), _size(draft / name)) for name in files[rank :: state.ranks]}
    known = {name: fact for part in gather(facts) for name, fact in part.items()}
    if rank == 0:
        hashes, sizes = ({name: fact[index] for name, fact in known.items()} for index in (0, 1))
        write_json(draft / MANIFEST, {"state": asdict(state), "files": hashes, "sizes": sizes})
        for folder in {(draft / name).parent for name in files}:
            sync(folder)
        _put(draft, final)
    gather({})
    return final


def _files(draft: Path) -> dict[str, str]:
    """Return the names of a draft's files, as what `gather` takes."""
    return {str(p.relative_to(draft)): "" for p in draft.rglob("*") if p.is_file()}


def _put(draft: Path, final: Path) -> None:
    """Give a draft its name. One that has the name already makes room by a rename: a removal could end half done."""
    old = _retire(final) if final.exists() else None
    draft.rename(final)
    sync(final.parent)
    if old is not None:
        shutil.rmtree(old)


def _retire(folder: Path) -> Path:
    return folder.rename(folder.with_name(f"{_REMOVING}{folder.name}"))


def prune(written: Path, keep: int) -> None:
    """Remove all checkpoints but the one just `written` and the newest `keep - 1` others."""
    others = [folder for folder in newest_first(written.parent) if folder != written]
    for old in others[keep - 1 :]:
        shutil.rmtree(_retire(old))  # a kill in the middle leaves no half one under a good name


def clear_ruins(checkpoints: Path) -> None:
    """Remove what writes and removals that were killed have left, before anything else needs the space."""
    for prefix in (_REMOVING, _WRITING):
        for ruin in checkpoints.glob(f"{prefix}*"):
            shutil.rmtree(ruin)


def abandon(checkpoints: Path, step: int, say: Callable[[str], None]) -> None:
    """Set aside the checkpoints of later steps than `step`: the run goes on from there, and they are another future.

    They are damaged, or another one was asked for. If they kept their names, the next resume would read them, and
    `prune` would count them as newest.
    """
    for folder in newest_first(checkpoints):
        if folder.name > folder_name(step):
            kept = folder.rename(folder.with_name(f"abandoned-{folder.name}-{time.time_ns()}"))
            say(f"{folder.name} is later than step {step} and is set aside as {kept.name}")


def read(folder: Path) -> TrainState:
    """Check every file against the manifest and return the state. Raises CheckpointError naming what is damaged."""
    state = read_state(folder)
    check_sizes(folder)  # first, because hashing takes minutes
    with _damage_told(folder):
        for name, digest in _manifest(folder)["files"].items():
            if _hash(folder / name) != digest:
                raise _damage(folder, f"{name} changed")
    return state


def check_sizes(folder: Path) -> None:
    """Raise CheckpointError for a file that is not there, or not as long as it was."""
    with _damage_told(folder):
        manifest = _manifest(folder)
        sizes = manifest.get("sizes", {})
        for name in manifest["files"]:
            size = _size(folder / name)
            if size != sizes.get(name, size):
                raise _damage(folder, f"{name} has {counted(size, 'byte')} instead of {sizes[name]:,}")


def read_state(folder: Path) -> TrainState:
    """Return the state of a checkpoint, unchecked: the launcher has read every byte, and ranks need not do it again."""
    if not folder.is_dir():
        hint = "`bytescale ckpt list RUN` shows those that there are"
        raise CheckpointError("there is no checkpoint of this name", key=str(folder), hint=hint)
    with _damage_told(folder):
        return TrainState(**_manifest(folder)["state"])


def _manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return manifest


@contextmanager
def _damage_told(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damage(folder, _reason(error)) from error


def _damage(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{DAMAGED}{what}", key=str(folder), hint=_way_out(folder))


def _way_out(folder: Path) -> str:
    others = [other.name for other in newest_first(folder.parent) if other != folder]
    return f"name another one, such as {others[0]}" if others else ANEW


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(error.filename).name} is missing"
    return "its manifest is unreadable"


def _size(path: Path) -> int:
    return path.stat().st_size


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _hash_and_sync(path: Path) -> str:
    sync(path)
    return _hash(path)
