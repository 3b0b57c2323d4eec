"""Writing files so that a reader, a full disk or a machine that stops never leaves half of one."""

from __future__ import annotations

import os
from pathlib import Path


def write_durably(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: temporary file, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk gets back what was written
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's entries (new, renamed, removed files), durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
