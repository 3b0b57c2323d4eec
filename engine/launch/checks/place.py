"""Checks where a run may write: in a new folder, an empty one or its own, never among the documents that it reads."""

from __future__ import annotations

import os
from pathlib import Path

from engine.config.schema import Config
from engine.config.sources import source_configs
from engine.data.apart import document_among, place_of, top_of
from engine.errors import RunFolderError
from engine.files import LOCK
from engine.run.folder import RunFolder


def check_place(folder: RunFolder, config: Config) -> None:
    """Raise RunFolderError if a run may not write to the folder.

    It must not contain the documents, nor be at a place where the run's own files would become documents. Nor may it be
    among the checkpoints of another run: a run inside a checkpoint damages it, and is deleted with it. If the folder
    does not contain a run yet, it may contain only hidden files and files that a run writes.
    """
    written = files_of_a_run(folder)
    key, hint = f"run.out={folder.root}", "choose a new folder with run.out=DIR"
    for parent in Path(os.path.realpath(folder.root)).parents:
        other = RunFolder(parent.parent)
        if parent == other.checkpoints and other.resolved.exists():
            raise RunFolderError(f"is among the checkpoints of the run {other.root}", key=key, hint=hint)
    for name, source in source_configs(config.data).items():
        for path in source.paths:
            _check_apart(folder, path, source.pattern, place_of(config.data, name, path))
    if folder.resolved.exists():
        return  # the folder of an existing run may contain other files too, such as notes
    try:
        names = sorted(path.name for path in folder.root.iterdir())
    except OSError:
        return  # it does not exist, or cannot be read, which locking it will report
    ours = {Path(name).parts[0] for name in written}
    foreign = [name for name in names if name not in ours and not name.startswith(".")]
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise RunFolderError(f"is not a run folder: it contains {foreign[0]}{more}", key=key, hint=hint)


def _check_apart(folder: RunFolder, path: str, pattern: str, place: str) -> None:
    """Raise RunFolderError if a run folder and documents overlap. `place` names the documents in the message."""
    key, hint = f"run.out={folder.root}", "choose a new folder with run.out=DIR"
    found = top_of(path, pattern)
    if found is not None and found[0].is_relative_to(os.path.realpath(folder.root)):
        raise RunFolderError(f"contains the documents of {place}", key=key, hint=hint)
    read = document_among(files_of_a_run(folder), folder.root, path, pattern)
    if read is not None:
        # The documents would change with every step, and the run could never be resumed.
        hint = "choose a folder outside with run.out=DIR, or narrow data.pattern"
        raise RunFolderError(f"is inside {place}, so {read} would become a document", key=key, hint=hint)


def files_of_a_run(folder: RunFolder) -> list[str]:
    """List an example of each kind of file that a run writes, also in checkpoints, relative to the run folder."""
    saved = folder.checkpoints / "step-00000001"
    files = [folder.resolved, folder.metrics, folder.summary, folder.plan, folder.trace, folder.report]
    files += [folder.script, folder.manifest, folder.launch("0"), folder.launches, folder.tracker("wandb")]
    files += [folder.speeds, folder.chaos / "log.jsonl", folder.root / LOCK, folder.log(0), folder.error(0)]
    files += [folder.nccl_record(0)]
    files += [saved / "manifest.json", saved / "zero" / "ranks-00000-00007.states"]
    return [path.relative_to(folder.root).as_posix() for path in files]
