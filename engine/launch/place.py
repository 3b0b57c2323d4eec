"""Where a run may write: a new or empty folder or its own, and nowhere that its files and the documents mix."""

from __future__ import annotations

import os
from pathlib import Path

from engine.config.schema import Config
from engine.data.folder import STDLIB, matches
from engine.errors import RunFolderError
from engine.trainer.folder import RunFolder

_HINT = "name a new folder with run.out=DIR"


def check_place(folder: RunFolder, config: Config) -> None:
    """Raise RunFolderError for a folder that holds somebody else's files, or that lies where documents are read."""
    _check_documents(Path(os.path.realpath(folder.root)), folder, config)
    if folder.resolved.exists():
        return
    strange = [name for name in _names(folder.root) if name not in _own(folder) and not name.startswith(".")]
    if strange:
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        message = f"is no run folder: it holds {strange[0]}{more}"
        raise RunFolderError(message, key=f"run.out={folder.root}", hint=_HINT)


def _check_documents(root: Path, folder: RunFolder, config: Config) -> None:
    if config.data.path == STDLIB:
        return
    data = Path(os.path.realpath(config.data.path))
    key, place = f"run.out={folder.root}", f"data.path={config.data.path}"
    if data == root or data.is_relative_to(root):
        raise RunFolderError(f"the documents of {place} lie there", key=key, hint=_HINT)
    if config.data.format != "folder" or not root.is_relative_to(data):
        return
    read = [
        name for name in _written(folder) if matches((root.relative_to(data) / name).as_posix(), config.data.pattern)
    ]
    if read:
        hint = "name a folder beside the documents with run.out=DIR, or narrow data.pattern"
        raise RunFolderError(f"lies in {place}, so {read[0]} would become a document", key=key, hint=hint)


def _own(folder: RunFolder) -> set[str]:
    """Return the names that a run gives what lies in its folder."""
    return {Path(name).parts[0] for name in _written(folder)}


def _written(folder: RunFolder) -> list[str]:
    """Return files that a run writes, one of each kind, as DeepSpeed's in a checkpoint."""
    saved = folder.checkpoints / "step-00000001"
    files = [folder.resolved, folder.metrics, folder.index, folder.summary, folder.plan, folder.trace, folder.report]
    files += [folder.root / ".lock", folder.log(0), folder.error(0), saved / "manifest.json", saved / "zero_to_fp32.py"]
    return [path.relative_to(folder.root).as_posix() for path in (*files, saved / "zero" / "rank_states.pt")]


def _names(root: Path) -> list[str]:
    """Return what lies in a folder, none if it is not there or not readable: the lock tells that."""
    try:
        return sorted(path.name for path in root.iterdir())
    except OSError:
        return []
