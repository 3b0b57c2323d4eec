"""Documents from a folder: each file is one document."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
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


def folder_files(data: schema.Data) -> tuple[Path, list[str]]:
    """Return a folder, and its files that match `data.pattern` (see `below`), sorted by their path relative to it.

    Raises DataError if there are none.
    """
    skipped: set[str] = set()
    if data.path == STDLIB:
        root, skipped = Path(sysconfig.get_paths()["stdlib"]), _NOT_STDLIB
    else:
        root = Path(data.path)
        found = kind(root)
        if found == "missing":
            raise DataError("no such folder", key=data.path, hint="set data.path to a folder of text files")
        if found == "file":
            with reading(root) as file:
                check(file.read(HEAD), "folder", data.path, data.path)
            hint = "data.format=jsonl reads one document per line"
            raise DataError("is a file, not a folder", key=data.path, hint=hint)
    names = sorted(below(root, data.pattern, skipped))
    if not names:
        hint = "set data.pattern, for example data.pattern='**/*.txt'"
        raise DataError(f"contains no files that match {data.pattern!r}", key=str(root), hint=hint)
    return root, names


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
        """Read each file. Raises DataError for one that is unreadable or no text."""
        for path in self.files:
            yield Document(path, _read(Path(path), self.root, self.encoding))


def folder_blocks(data: schema.Data) -> list[Block]:
    """Split the files of a folder into blocks of 64 files."""
    return _blocks(*folder_files(data), data.encoding)


def folder_sample(data: schema.Data, sample: int | None, seed: int) -> tuple[list[Block], float]:
    """Choose `sample` random files of a folder; without `sample`, all files, but at most 100,000.

    Returns blocks of 64 files, and the fraction of all files that they contain.
    """
    root, names = folder_files(data)
    count = min(len(names), sample or _MOST_FILES)
    chosen = [names[number] for number in choose(len(names), count, seed).tolist()]
    return _blocks(root, chosen, data.encoding), count / len(names)


def _blocks(root: Path, names: list[str], encoding: str) -> list[Block]:
    parts = (tuple(names[first : first + _BLOCK_FILES]) for first in range(0, len(names), _BLOCK_FILES))
    return [FolderBlock(root, part, encoding) for part in parts]
