"""Documents from a folder: each file is one document."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from engine.config import schema
from engine.data.sources.files import kind, reading, unreadable
from engine.data.sources.source import Part, choose
from engine.errors import DataError

STDLIB = "stdlib"
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
_MOST_FILES = 100_000  # files that `profile-data` reads without --sample
_PART_FILES = 64
_HINT = "make it a readable file, or exclude it with data.pattern"


class FolderSource:
    """The files below `data.path` whose relative path matches `data.pattern`, sorted by that path.

    In a pattern `*` stays within one folder and `**` matches any number of folders. Links to folders are not followed.
    """

    blank = 0

    def __init__(self, data: schema.Data) -> None:
        skipped: set[str] = set()
        if data.path == STDLIB:
            self._root, skipped = Path(sysconfig.get_paths()["stdlib"]), _NOT_STDLIB
        else:
            self._root = Path(data.path)
            found = kind(self._root)
            if found == "missing":
                raise DataError("no such folder", key=data.path, hint="set data.path to a folder of text files")
            if found == "file":
                hint = "data.format=jsonl reads one document per line"
                raise DataError("is a file, not a folder", key=data.path, hint=hint)
        self._encoding = data.encoding

        def refuse(error: OSError) -> None:
            raise unreadable(Path(error.filename), error) from error

        names: list[str] = []
        for folder, subfolders, files in os.walk(self._root, onerror=refuse):
            subfolders[:] = [name for name in subfolders if name not in skipped]
            relative = Path(folder).relative_to(self._root)
            paths = [(relative / name).as_posix() for name in files]
            names += [path for path in paths if matches(path, data.pattern)]
        self.names = tuple(sorted(names))
        if not self.names:
            raise DataError(
                f"contains no files that match {data.pattern!r}",
                key=str(self._root),
                hint="set data.pattern, for example data.pattern='**/*.txt'",
            )

    def place(self, document: int) -> str:
        """Return the path of a document."""
        return str(self._root / self.names[document])

    def read(self, document: int) -> bytes:
        """Return a document's bytes. Raises DataError if it is unreadable, or not UTF-8 with data.encoding=utf-8."""
        with reading(self._root / self.names[document], _HINT) as file:
            text = file.read()
        if self._encoding == "utf-8":
            try:
                text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"is not UTF-8 at byte {error.start}",
                    key=self.place(document),
                    hint="data.encoding=bytes accepts any file",
                ) from error
        return text

    def read_span(self, document: int, start: int, stop: int) -> bytes:
        """Return bytes start .. stop - 1 of a document; fewer if it is shorter."""
        with reading(self._root / self.names[document], _HINT) as file:
            file.seek(start)
            return file.read(stop - start)


@dataclass(frozen=True)
class FolderPart:
    """Some of the files of a folder: those in `source.names`."""

    source: FolderSource

    def sizes(self) -> list[int]:
        """Return the length in bytes of each file. Raises DataError as `FolderSource.read` does."""
        return [len(self.source.read(document)) for document in range(len(self.source.names))]


def folder_parts(data: schema.Data, sample: int | None, seed: int) -> tuple[list[Part], float]:
    """Split the files of a folder, or `sample` random ones, into parts of 64 files.

    Returns the parts and the fraction of all files that they contain. Without `sample`, uses at most 100,000 files.
    """
    source = FolderSource(data)
    files = len(source.names)
    count = min(files, sample or _MOST_FILES)
    chosen = choose(files, count, seed)
    parts: list[Part] = []
    for first in range(0, count, _PART_FILES):
        some = copy(source)
        some.names = tuple(source.names[document] for document in chosen[first : first + _PART_FILES].tolist())
        parts.append(FolderPart(some))
    return parts, count / files


def matches(name: str, pattern: str) -> bool:
    """Return whether a POSIX path relative to the folder matches a pattern (see `FolderSource`).

    `Path.glob` is not used because its results for links and unreadable folders differ between Python versions.
    """

    def match(parts: Sequence[str], patterns: Sequence[str]) -> bool:
        if not patterns:
            return not parts
        if patterns[0] == "**":
            return match(parts, patterns[1:]) or (bool(parts) and match(parts[1:], patterns))
        return bool(parts) and fnmatchcase(parts[0], patterns[0]) and match(parts[1:], patterns[1:])

    return match(name.split("/"), pattern.split("/"))
