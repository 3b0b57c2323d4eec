"""Reading files, with every failure of the disk turned into a DataError that names the file.

Messages of `engine/data` read on from their place: `docs/a.txt: is not UTF-8 at byte 7`.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from engine.errors import DataError


def kind(path: Path) -> Literal["folder", "file", "missing"]:
    """Return what stands at a path. Raises DataError when the system does not tell."""
    try:
        return "folder" if stat.S_ISDIR(path.stat().st_mode) else "file"
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError as error:
        raise unreadable(path, error) from error


@contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read bytes. Raises DataError when it cannot be opened or read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise DataError("is not a regular file", key=str(path), hint="leave it out of data.path or data.pattern")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> DataError:
    """Return the refusal for a file or folder that the system does not let us read."""
    reason = error.strerror or type(error).__name__
    return DataError(
        f"cannot be read: {reason}", key=str(path), hint="mend or remove it, or leave it out of data.pattern"
    )
