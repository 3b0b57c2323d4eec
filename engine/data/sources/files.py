"""File access for sources of documents. Every failure becomes a DataError that names the file.

Messages are written to follow the place: `docs/a.txt: is not UTF-8 at byte 7`.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from engine.errors import DataError

_HINT = "choose a path that this user can read"


def kind(path: Path) -> Literal["folder", "file", "missing"]:
    """Return what a path refers to. Raises DataError if that cannot be determined, for example without permission."""
    try:
        return "folder" if stat.S_ISDIR(path.stat().st_mode) else "file"
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError as error:
        raise unreadable(path, error) from error


@contextmanager
def reading(path: Path, hint: str = _HINT) -> Iterator[BinaryIO]:
    """Open a regular file in binary mode, as a context. Raises DataError if opening it, or reading it later, fails."""
    try:
        # Opening a named pipe would block until something writes to it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError("is not a regular file", key=str(path), hint=hint)
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error, hint) from error


def unreadable(path: Path, error: OSError, hint: str = _HINT) -> DataError:
    """Create the DataError for a file or folder that cannot be read, with the reason of the OSError."""
    reason = error.strerror or type(error).__name__
    return DataError(f"cannot be read: {reason}", key=str(path), hint=hint)
