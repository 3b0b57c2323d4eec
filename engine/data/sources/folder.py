"""Documents from a folder: each file is one document."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from engine.config import schema
from engine.data.sources.files import kind, reading, unreadable
from engine.data.sources.source import Block, Document, choose
from engine.errors import DataError

STDLIB = "stdlib"
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
_MOST_FILES = 100_000  # files that `profile-data` reads without --sample
_BLOCK_FILES = 64
_HINT = "make it a readable file, or exclude it with data.pattern"


class FolderSource:
    """The files below `data.path` whose relative path matches `data.pattern`, sorted by that path.

    In a pattern `*` stays within one folder and `**` matches any number of folders. Links to folders are not followed.
    """

    blank = 0

    def __init__(self, data: schema.Data) -> None:
        skipped: set[str] = set()
        if data.path == STDLIB:
            self.root, skipped = Path(sysconfig.get_paths()["stdlib"]), _NOT_STDLIB
        else:
            self.root = Path(data.path)
            found = kind(self.root)
            if found == "missing":
                raise DataError("no such folder", key=data.path, hint="set data.path to a folder of text files")
            if found == "file":
                hint = "data.format=jsonl reads one document per line"
                raise DataError("is a file, not a folder", key=data.path, hint=hint)
        self.encoding = data.encoding

        def refuse(error: OSError) -> None:
            raise unreadable(Path(error.filename), error) from error

        names: list[str] = []
        for folder, subfolders, files in os.walk(self.root, onerror=refuse):
            subfolders[:] = [name for name in subfolders if name not in skipped]
            relative = Path(folder).relative_to(self.root)
            paths = [(relative / name).as_posix() for name in files]
            names += [path for path in paths if matches(path, data.pattern)]
        self.names = tuple(sorted(names))
        if not self.names:
            raise DataError(
                f"contains no files that match {data.pattern!r}",
                key=str(self.root),
                hint="set data.pattern, for example data.pattern='**/*.txt'",
            )

    def place(self, document: int) -> str:
        """Return the path of a document."""
        return str(self.root / self.names[document])

    def read(self, document: int) -> bytes:
        """Return a document's bytes. Raises DataError if it is unreadable, or not UTF-8 with data.encoding=utf-8."""
        return _read(self.root / self.names[document], self.encoding)

    def read_span(self, document: int, start: int, stop: int) -> bytes:
        """Return bytes start .. stop - 1 of a document; fewer if it is shorter."""
        with reading(self.root / self.names[document], _HINT) as file:
            file.seek(start)
            return file.read(stop - start)


def _read(path: Path, encoding: str) -> bytes:
    """Read a file. Raises DataError if it is unreadable, or not UTF-8 with the encoding `utf-8`."""
    with reading(path, _HINT) as file:
        text = file.read()
    if encoding == "utf-8":
        try:
            text.decode("utf-8")
        except UnicodeDecodeError as error:
            message, hint = f"is not UTF-8 at byte {error.start}", "data.encoding=bytes accepts any file"
            raise DataError(message, key=str(path), hint=hint) from error
    return text


@dataclass(frozen=True)
class FolderBlock:
    """Some of the files of a folder, by their paths relative to `root`."""

    root: Path
    names: tuple[str, ...]
    encoding: str

    @property
    def files(self) -> list[Path]:
        return [self.root / name for name in self.names]

    def documents(self) -> Iterator[Document]:
        """Read each file. Raises DataError as `FolderSource.read` does."""
        for path in self.files:
            yield Document(str(path), _read(path, self.encoding))


def folder_blocks(data: schema.Data) -> list[Block]:
    """Split the files of a folder into blocks of 64 files."""
    source = FolderSource(data)
    return _blocks(source, range(len(source.names)))


def folder_sample(data: schema.Data, sample: int | None, seed: int) -> tuple[list[Block], float]:
    """Choose `sample` random files of a folder; without `sample`, all files, but at most 100,000.

    Returns blocks of 64 files, and the fraction of all files that they contain.
    """
    source = FolderSource(data)
    files = len(source.names)
    count = min(files, sample or _MOST_FILES)
    return _blocks(source, choose(files, count, seed).tolist()), count / files


def _blocks(source: FolderSource, documents: Sequence[int]) -> list[Block]:
    names = [source.names[document] for document in documents]
    parts = (tuple(names[first : first + _BLOCK_FILES]) for first in range(0, len(names), _BLOCK_FILES))
    return [FolderBlock(source.root, part, source.encoding) for part in parts]


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
