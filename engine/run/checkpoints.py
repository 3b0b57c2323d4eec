"""Writes and reads checkpoints. A checkpoint is complete or absent, and a damaged one is never used.

Checkpoint formats load a flipped bit without an error (in 40 of 40 trials), and a process that is killed while it
overwrites a checkpoint leaves half of it. Therefore a checkpoint is written under a temporary name, with a manifest of
hashes, and renamed when every byte is on disk. All hashes are checked before it is used. Does not import torch: the
launcher checks them before any rank starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.config.units import counted
from engine.errors import CheckpointError
from engine.files import LOCK, draft_of, locked_draft, publish, remove_folder, sync, write_json

MANIFEST = "manifest.json"
PREFIX = "step-"
DAMAGED = "checkpoint is damaged: "
START_OVER = "`train --resume never` starts again from step 1 and keeps the old run in a folder next to it"


@dataclass(frozen=True)
class TrainState:
    """What a run needs to resume in addition to the tensors, as plain data."""

    step: int  # the last finished step
    cursor: dict[str, Any]  # where the next step begins in the order of documents, see engine/data/steps.py
    ranks: int  # number of ranks that wrote the checkpoint
    fingerprints: Mapping[str, str]  # of the documents of each source, by name
    must_match: dict[str, Any]  # config values that a resumed run must keep, see compatibility.py
    tokenizer: Mapping[str, Any] | None = None  # of texts, from `tokenizer_facts`; None in older checkpoints


def folder_name(step: int) -> str:
    """Return the name of a step's checkpoint folder, such as step-00000100."""
    return f"{PREFIX}{step:08d}"


def newest_first(checkpoints: Path) -> list[Path]:
    """List the finished checkpoints in a folder, newest first; none if there is no such folder.

    One that is still being written is not listed. Raises PermissionError for a folder that cannot be listed, where
    `Path.glob` would find nothing, and the run would start over.
    """
    try:
        with os.scandir(checkpoints) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(PREFIX) and entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [checkpoints / name for name in sorted(names, reverse=True)]


def write(
    checkpoints: Path,
    state: TrainState,
    rank: int,
    save_tensors: Callable[[Path], None],
    gather: Callable[[dict[str, Any]], list[dict[str, Any]]],
) -> Path:
    """Write one checkpoint. Collective: all ranks must call it, on a shared file system.

    `save_tensors(folder)` writes the files of this rank. `gather(facts)` is an all-gather: every rank gets the list of
    all ranks' facts. The ranks divide the work of hashing and syncing all files. Returns the checkpoint's folder.
    """
    final = checkpoints / folder_name(state.step)
    with locked_draft(final) if rank == 0 else nullcontext(draft_of(final)) as draft:
        gather({})  # the draft exists
        save_tensors(draft)
        gather({})  # every file is written
        # Rank 0 lists the files for all: on a network file system ranks may see different lists for a while.
        found = [p for p in draft.rglob("*") if p.is_file() and p.name != LOCK] if rank == 0 else []
        files = sorted(gather({str(path.relative_to(draft)): "" for path in found})[0])
        facts = {}
        for name in files[rank :: state.ranks]:
            sync(draft / name)
            facts[name] = (_hash(draft / name), _size(draft / name))
        known = {name: fact for part in gather(facts) for name, fact in part.items()}
        if rank == 0:
            hashes, sizes = ({name: fact[index] for name, fact in known.items()} for index in (0, 1))
            write_json(draft / MANIFEST, {"state": asdict(state), "files": hashes, "sizes": sizes})
            publish(draft, final, replace=True)
    gather({})
    return final


def prune(written: Path, keep: int) -> None:
    """Remove all checkpoints but the one just `written` and the newest `keep - 1` others."""
    others = [folder for folder in newest_first(written.parent) if folder != written]
    for old in others[keep - 1 :]:
        remove_folder(old)


def abandon(checkpoints: Path, step: int, say: Callable[[str], None]) -> None:
    """Rename the checkpoints of steps after `step`, from which the run resumes (0 for a new run).

    They are damaged, or the user chose an earlier checkpoint. If they kept their names, the next resume would use them,
    and `prune` would keep them as the newest.
    """
    for folder in newest_first(checkpoints):
        if folder.name > folder_name(step):
            kept = folder.rename(folder.with_name(f"abandoned-{folder.name}-{time.time_ns()}"))
            say(f"{folder.name} is newer than step {step}, from which this run resumes; it is kept as {kept.name}")


def read(folder: Path) -> TrainState:
    """Check the hash of every file and return the state. Raises CheckpointError that names the damage."""
    state = read_state(folder)
    check_sizes(folder)  # first, because hashing takes minutes
    with _reports_damage(folder):
        for name, digest in _manifest(folder)["files"].items():
            if _hash(folder / name) != digest:
                raise _damage(folder, f"{name} does not match its hash")
    return state


def check_sizes(folder: Path) -> None:
    """Raise CheckpointError if a file is missing or its size differs from the manifest, or if that is unreadable."""
    with _reports_damage(folder):
        manifest = _manifest(folder)
        sizes = manifest.get("sizes", {})  # the first manifests had none
        for name in manifest["files"]:
            size = _size(folder / name)
            if size != sizes.get(name, size):
                raise _damage(folder, f"{name} has {counted(size, 'byte')} instead of {sizes[name]:,}")


def read_state(folder: Path) -> TrainState:
    """Read the state of a checkpoint. Its other files are not checked; `read` checks them too.

    Raises CheckpointError if the checkpoint or its manifest cannot be read.
    """
    if not folder.is_dir():
        hint = "`bytescale ckpt list RUN` shows the checkpoints of a run"
        raise CheckpointError("no such checkpoint", key=str(folder), hint=hint)
    with _reports_damage(folder):
        values = _manifest(folder)["state"]
        if "lineage" in values:  # the field's first name
            values["must_match"] = values.pop("lineage")
        if "epoch" in values:  # of an older order of documents, which cannot be resumed; its weights can be exported
            del values["epoch"], values["position"]
            values |= {"cursor": {}, "fingerprints": {"data": values.pop("fingerprint")}}
        return TrainState(**values)


def _manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return manifest


@contextmanager
def _reports_damage(folder: Path) -> Iterator[None]:
    """Turn errors from reading a checkpoint or its manifest into a CheckpointError that names the damage.

    A file that this user may not read is not damaged: PermissionError passes, so that no older checkpoint is chosen.
    """
    try:
        yield
    except PermissionError:
        raise
    except FileNotFoundError as error:
        raise _damage(folder, f"{Path(error.filename).name} is missing") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damage(folder, f"{MANIFEST} is unreadable") from error


def _damage(folder: Path, what: str) -> CheckpointError:
    """Create the error for a damaged checkpoint. Its hint names another checkpoint of the run, if there is one."""
    others = [other.name for other in newest_first(folder.parent) if other != folder]
    hint = f"choose another checkpoint, such as {others[0]}" if others else START_OVER
    return CheckpointError(f"{DAMAGED}{what}", key=str(folder), hint=hint)


def _size(path: Path) -> int:
    return path.stat().st_size


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
