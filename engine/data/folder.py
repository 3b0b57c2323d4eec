"""Documents that are the files of a folder."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from engine.config import schema
from engine.data.files import kind, reading, unreadable
from engine.errors import DataError

STDLIB = "stdlib"
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


class FolderSource:
    """The files under `root` whose relative path matches the pattern, sorted by that path: `names`.

    In a pattern `*` stays within one folder and `**` stands for any number of folders.
    Links to folders are not followed.
    """

    blank = 0

    def __init__(self, data: schema.Data) -> None:
        self._root, skipped = _root(data)
        self._encoding = data.encoding
        self.names = tuple(sorted(name for name in _files(self._root, skipped) if matches(name, data.pattern)))
        if not self.names:
            raise DataError(
                f"holds no file that matches {data.pattern!r}",
                key=str(self._root),
                hint="set data.pattern, for example data.pattern='**/*.txt'",
            )

    def place(self, document: int) -> str:
        """Return where a document stands, for messages."""
        return str(self._root / self.names[document])

    def read(self, document: int) -> bytes:
        """Return a document's text. Raises DataError when it is unreadable, or not UTF-8 where UTF-8 is asked."""
        with reading(self._root / self.names[document]) as file:
            text = file.read()
        if self._encoding == "utf-8":
            self._check_utf8(document, text)
        return text

    def read_span(self, document: int, start: int, stop: int) -> bytes:
        """Return bytes start..stop of a document's text; fewer if the file has become shorter."""
        with reading(self._root / self.names[document]) as file:
            file.seek(start)
            return file.read(stop - start)

    def _check_utf8(self, document: int, text: bytes) -> None:
        try:
            text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"is not UTF-8 at byte {error.start}",
                key=self.place(document),
                hint="data.encoding=bytes takes files as they are",
            ) from error


def _root(data: schema.Data) -> tuple[Path, set[str]]:
    """Return the folder, and the names of folders in it that do not count."""
    if data.path == STDLIB:
        return Path(sysconfig.get_paths()["stdlib"]), _NOT_STDLIB
    root = Path(data.path)
    found = kind(root)
    if found == "missing":
        raise DataError("there is no such folder", key=data.path, hint="set data.path to a folder of text files")
    if found == "file":
        raise DataError("is a file, not a folder", key=data.path, hint="data.format=jsonl reads one document a line")
    return root, set()


def _files(root: Path, skipped: set[str]) -> Iterator[str]:
    """Yield the relative POSIX path of each file under a folder. Raises DataError at a folder that is unreadable."""

    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename), error) from error

    for folder, subfolders, files in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if name not in skipped]
        relative = Path(folder).relative_to(root)
        yield from ((relative / name).as_posix() for name in files)


def matches(name: str, pattern: str) -> bool:
    """Return whether a path relative to the folder matches a pattern, so that it is a document."""
    return _matches(name.split("/"), pattern.split("/"))


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a path matches a pattern, both split at `/`.

    Our own, because what `Path.glob` finds behind links and unreadable folders differs between Pythons.
    """
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or (bool(parts) and _matches(parts[1:], pattern))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
