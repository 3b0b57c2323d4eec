"""Lists, checks and removes the checkpoints of a run, and chooses the one to resume from. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine.config.explain.spelling import did_you_mean
from engine.errors import CheckpointError, ConfigError, RunFolderError
from engine.files import LOCK, locked
from engine.folders import remove_folder
from engine.run import metrics
from engine.run.checkpoints import (
    DAMAGED,
    MANIFEST,
    START_OVER,
    Retention,
    UnknownFormatError,
    bytes_of,
    check_sizes,
    newest_first,
    read,
    read_state,
    step_of,
)
from engine.run.folder import RunFolder, changing
from engine.run.remote import Remote, is_url, reaching


def check_exists(resume: str) -> None:
    """Raise CheckpointError if there is no file or folder `resume`; ConfigError if it looks like `auto` or `never`."""
    if Path(resume).exists():
        return
    what, key = "no such file or folder", f"--resume {resume}"
    if Path(resume).name == resume and (meant := did_you_mean(resume, ("auto", "never"))):
        raise ConfigError(what, key=key, hint=meant)
    hint = "choose auto, never, a run or a checkpoint; `bytescale ckpt list RUN` lists those of a run"
    raise CheckpointError(what, key=key, hint=hint)


def find(source: Path) -> Path:
    """Return `source` if it is a checkpoint, else the newest checkpoint of the run `source`; does not check its files.

    Raises CheckpointError if there is none.
    """
    if (source / MANIFEST).exists():
        return source
    found = newest_first(RunFolder(source).checkpoints)
    if not found:
        hint = "choose a run, or a checkpoint RUN/checkpoints/step-...; `bytescale ckpt list RUN` lists those of a run"
        what = "is neither a checkpoint nor a run that has one" if source.is_dir() else "no such folder"
        if RunFolder(source).resolved.is_file():
            what = "has no checkpoint yet"
            hint = "`bytescale runs status RUN` shows how far it is; it saves one every run.checkpoint_every steps"
        raise CheckpointError(what, key=str(source), hint=hint)
    return found[0]


def choose(checkpoints: Path, say: Callable[[str], None], hashes: bool = True) -> Path | None:
    """Return the newest intact checkpoint, or None if there are no checkpoints at all. Changes nothing on disk.

    Without `hashes` only manifests and the sizes of files are checked, which reads little.
    Raises CheckpointError if every checkpoint is damaged: starting over silently would hide the loss. Raises
    UnknownFormatError if a newer version wrote the newest.
    """
    damaged: list[tuple[str, str]] = []
    for folder in newest_first(checkpoints):
        try:
            read(folder) if hashes else check_sizes(folder)
        except UnknownFormatError:
            raise
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


def verified(source: Path, say: Callable[[str], None], hashes: bool = True) -> Path:
    """Return `source` if it is a checkpoint, else the newest intact checkpoint of the run `source`.

    All hashes are checked, or only manifests and sizes as in `choose`. Raises CheckpointError if the checkpoint is
    damaged, or if the run has no intact one.
    """
    found = find(source)
    if found != source:
        return choose(found.parent, say, hashes) or found
    read(found) if hashes else check_sizes(found)
    return found


def listed(run: Path | str) -> list[dict[str, Any]]:
    """Return path, step, ranks, bytes and damage of each checkpoint of a run, newest first.

    `damaged` is the damage that a comparison of file sizes shows, or None. Hashes are not checked: that would take
    minutes. `ranks` is None if the manifest cannot be read. `run` may be the URL of a folder of checkpoints; there only
    manifests are read. Raises CheckpointError if there is no checkpoint, and PermissionError if this user may read none
    of them.
    """
    if is_url(run):
        remote = Remote(str(run), "RUN")
        with reaching(remote):
            return remote.listed()
    # One damaged or unreadable checkpoint must not hide the others.
    rows, forbidden = [], list[PermissionError]()
    for folder in newest_first(find(Path(run)).parent):
        step, ranks, damaged = step_of(folder), None, None
        try:
            state = read_state(folder)
            step, ranks = state.step, state.ranks
            check_sizes(folder)
        except CheckpointError as error:
            damaged = str(error).removeprefix(DAMAGED)
        except PermissionError as error:  # must not hide the others
            damaged = f"{Path(error.filename).name} may not be read"
            forbidden.append(error)
        rows.append(
            {
                "path": str(folder),
                "step": None if step < 0 else step,
                "ranks": ranks,
                "bytes": bytes_of(folder),
                "damaged": damaged,
            }
        )
    if len(forbidden) == len(rows):
        raise forbidden[0]
    return rows


def check_all(source: Path | str) -> list[dict[str, Any]]:
    """Compare all hashes of a checkpoint, or of every checkpoint of a run; return path and damage (or None) of each.

    `source` may be a URL: of a folder of checkpoints, or of one checkpoint in it.
    """
    if is_url(source):
        remote = Remote(str(source), "RUN")
        with reaching(remote):
            return remote.checked()
    found = find(Path(source))
    rows = []
    for folder in [found] if found == Path(source) else newest_first(found.parent):
        damaged = None
        try:
            read(folder)
        except UnknownFormatError:
            raise
        except CheckpointError as error:
            damaged = str(error).removeprefix(DAMAGED)
        rows.append({"path": str(folder), "damaged": damaged})
    return rows


def thin_out(run: Path, keep: Retention, dry_run: bool, say: Callable[[str], None]) -> list[Path]:
    """Remove the checkpoints of a run that `keep` does not keep, and return them. `dry_run` removes nothing.

    The newest that are kept are compared with their hashes first: a damaged checkpoint does not count, and stays.
    Raises CheckpointError if the run has no checkpoint, RunFolderError if another process is using the run, or if this
    user may not write to it.
    """
    folder, intact = RunFolder(run), list[Path]()
    find(run)
    with ExitStack() as stack:
        if not dry_run:
            try:
                with changing(run):
                    stack.enter_context(locked(folder.root / LOCK))
            except BlockingIOError as error:
                hint = "wait until it ends; a run removes old checkpoints itself: run.keep_checkpoints"
                raise RunFolderError("a run is using this folder", key=str(run), hint=hint) from error
        for one in newest_first(folder.checkpoints):
            try:
                if len(intact) < keep.newest:
                    read(one)
            except UnknownFormatError:
                raise
            except CheckpointError as error:
                say(f"warning: {one.name} is damaged ({str(error).removeprefix(DAMAGED)}); it is kept, but not counted")
            else:
                intact.append(one)
        removed = keep.removes(intact, metrics.validation_losses(folder.metrics))
        for old in () if dry_run else removed:
            with changing(run):
                remove_folder(old)
    return removed
