"""Documents from a folder: each file is one document."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.config import schema
from engine.data.sources.content import HEAD, check
from engine.data.sources.files import below, kind, reading
from engine.data.sources.source import Block, Document, checked_text, choose
from engine.errors import DataError

STDLIB = "stdlib"
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
_MOST_FILES = 100_000  # files that `profile-data` reads without --sample
_BLOCK_FILES = 64
_HINT = "make it a readable file, or exclude it with data.pattern"


class FolderSource:
    """The files below `data.path` whose relative path matches `data.pattern` (see `below`), sorted by that path."""

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
                with reading(self.root) as file:
                    check(file.read(HEAD), "folder", data.path, data.path)
                hint = "data.format=jsonl reads one document per line"
                raise DataError("is a file, not a folder", key=data.path, hint=hint)
        self.encoding = data.encoding
        self.names = tuple(sorted(below(self.root, data.pattern, skipped)))
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
        return _read(self.root / self.names[document], self.root, self.encoding)

    def read_span(self, document: int, start: int, stop: int) -> bytes:
        """Return bytes start .. stop - 1 of a document; fewer if it is shorter."""
        with reading(self.root / self.names[document], _HINT) as file:
            file.seek(start)
            return file.read(stop - start)


def _read(path: Path, root: Path, encoding: str) -> bytes:
    """Read a file. Raises DataError if it is unreadable, binary, JSON lines, or not UTF-8 with the encoding `utf-8`."""
    with reading(path, _HINT) as file:
        text = file.read()
    check(text, "folder", str(path), str(root))
    return checked_text(text, encoding, str(path))


@dataclass(frozen=True)
class FolderBlock:
    """Some of the files of a folder, by their paths relative to `root`."""

    root: Path
    names: tuple[str, ...]
    encoding: str

    @property
    def files(self) -> list[str]:
        return [str(self.root / name) for name in self.names]

    def documents(self) -> Iterator[Document]:
        """Read each file. Raises DataError as `FolderSource.read` does."""
        for path in self.files:
            yield Document(path, _read(Path(path), self.root, self.encoding))


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
