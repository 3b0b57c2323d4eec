"""Keeps what we write apart from documents: files that become documents would change them with every step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from engine.config import schema
from engine.config.sources import BUILT_IN, source_configs
from engine.data.cache import ENDINGS, IDENTITY, RANKS, cache_folder
from engine.data.sources.files import matches, split_glob
from engine.data.sources.urls import is_url
from engine.errors import ConfigError
from engine.folders import MARK


def place_of(data: schema.Data, name: str, path: str) -> str:
    """Return how a config names a path of the source `name`, for messages."""
    return f"data.{f'sources.{name}.' if data.sources else ''}path={path}"


def top_of(path: str, pattern: str) -> tuple[Path, str] | None:
    """Return the real path of the folder or file that a path begins with, and the pattern of documents below it.

    None for a URL and for Python's standard library.
    """
    if path in BUILT_IN or is_url(path):
        return None
    top, pattern = (path, pattern) if Path(path).exists() else split_glob(path)
    return Path(os.path.realpath(top)), pattern


def document_among(written: Sequence[str], folder: Path, path: str, pattern: str) -> str | None:
    """Return the first of the files `written` (relative to `folder`) that would be a document of a path, or None."""
    found = top_of(path, pattern)
    root = Path(os.path.realpath(folder))
    if found is None or not root.is_relative_to(found[0]):
        return None
    inside = root.relative_to(found[0])
    return next((name for name in written if matches((inside / name).as_posix(), found[1])), None)


def check_cache(data: schema.Data) -> None:
    """Raise ConfigError if files of the cache folder would become documents."""
    folder, name = cache_folder(data), "00" * 16
    draft = f"00/.writing-{name}.{'0' * 16}"
    written = [f"00/{name}{ending}" for ending in (*ENDINGS, ".lock")] + [
        f"{draft}/{name}/{name}.bin",
        f"{draft}/{MARK}",
        IDENTITY,
        f".writing-{RANKS}.{'0' * 16}/{RANKS}/step-1.0",
    ]
    for source, one in source_configs(data).items():
        for path in one.paths if one.format != "tokens" else ():
            read = document_among(written, folder, path, one.pattern)
            if read is not None:
                # The documents would change while they are read, and no run could be resumed.
                message = f"is inside {place_of(data, source, path)}, so {read} would become a document"
                hint = "choose a folder outside with data.cache=DIR, or narrow data.pattern"
                raise ConfigError(message, key=f"data.cache={folder}", hint=hint)
