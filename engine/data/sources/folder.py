"""Documents from a folder: each file is one document, or several with a text between them, `data.separator`."""

from __future__ import annotations

import shlex
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.config import schema
from engine.config.sources import BUILT_IN
from engine.data.sources.compressed import MOST_BYTES, unpacked
from engine.data.sources.content import HEAD, check
from engine.data.sources.files import NOWHERE, below, check_different, file_size, kind, no_match, split_glob
from engine.data.sources.source import Block, Document, checked_text, choose, sample_blocks
from engine.data.sources.urls import is_url
from engine.errors import DataError

STDLIB, LINES = BUILT_IN
_NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}
_MOST_FILES = 100_000  # files that `profile-data` reads without --sample
_BLOCK_FILES = 64
_WHOLE = 4  # of the files of LINES, each fourth is one document
_HINT = "make it a readable file, or exclude it with data.pattern"


def folder_files(data: schema.Data) -> list[tuple[Path, list[str]]]:
    """Return each folder, and its files that match `data.pattern` (see `below`), sorted by their path relative to it.

    Raises DataError if there are none in a folder, or if a file is in two of them.
    """
    folders = [_names(path, data.pattern) for path in data.paths]
    if len(folders) > 1:
        check_different([str(root / name) for root, names in folders for name in names])
    return folders


def _names(path: str, pattern: str) -> tuple[Path, list[str]]:
    """Return a folder, and its files that match, sorted."""
    skipped: set[str] = set()
    if path in BUILT_IN:
        root, skipped = Path(sysconfig.get_paths()["stdlib"]), _NOT_STDLIB
    else:
        if is_url(path):
            raise DataError("is a URL, and texts are read from local folders", key=path, hint="copy the files into one")
        root = Path(path)
        found = kind(root)
        if found == "missing":
            folder, names_below = split_glob(path)
            inside = f"data.path={shlex.quote(folder)} data.pattern={shlex.quote(names_below)}"
            raise DataError(NOWHERE[0], key=path, hint=f"set {inside}" if names_below else NOWHERE[1])
        if found == "file":
            with unpacked(root) as file:
                check(file.read(HEAD), "folder", path, path, unpacked=True)
            inside = f"data.path={shlex.quote(str(root.parent))} data.pattern={shlex.quote(root.name)}"
            hint = f"set {inside} for a text; data=jsonl reads one document per line"
            raise DataError("is a file, not a folder", key=path, hint=hint)
    names = sorted(below(root, pattern, skipped))
    if not names:
        hint = "set data.pattern, for example data.pattern='**/*.txt'"
        raise no_match(root, pattern, hint, skipped)
    return root, names


def _split(text: bytes, separator: bytes, path: str) -> Iterator[Document]:
    """Yield the documents between separators, each with the line that it begins in. A blank one has an empty text."""
    at, line = 0, 1
    for part in text.split(separator):
        yield Document(f"{path}:{line}", b"" if part.isspace() else part)
        after = at + len(part) + len(separator)
        line += text.count(b"\n", at, after)
        at = after


@dataclass(frozen=True)
class FolderBlock(Block):
    """Some of the files of a folder, by their paths relative to `root`."""

    root: str
    names: str  # with NUL between them: each process has those of all files, and objects for each would be much larger
    encoding: str
    arrays: bool  # whether data.pattern names JSON files: then JSON arrays of objects are texts, too
    separator: str | None  # between the documents of a file; None: a file is one document
    # Bytes of the files when they were listed. Not in the repr, which names the block in a cache beside the present
    # sizes (parts.part_path): a file that changes during a run has the same name there as for the next run.
    length: int = field(repr=False)
    transform: str = field(default="", repr=False)

    @property
    def files(self) -> list[str]:
        begin = str(Path(self.root, "_"))[:-1]  # joining each path takes longer than looking up its file
        return [f"{begin}{name}" for name in self.names.split("\0") if name]

    @property
    def reading(self) -> Mapping[str, Any]:
        unset = {"root"} if self.separator is not None else {"root", "separator"}
        return {key: value for key, value in super().reading.items() if key not in unset}

    def in_file(self, file: str) -> Iterable[int]:
        return [self.files.index(file)] if self.separator is None else super().in_file(file)

    def after(self, file: str) -> Block | None:
        if file not in self.files:
            return None
        return replace(self, names="\0".join(self.names.split("\0")[self.files.index(file) + 1 :]))

    @property
    def size(self) -> int:
        return self.length

    def documents(self) -> Iterator[Document]:
        """Read each file, which may be compressed.

        One cannot be used if it is binary, JSON lines, an array of JSON objects unless `arrays`, or not UTF-8 with the
        encoding `utf-8`. Raises DataError for one that is unreadable.
        """
        for path in self.files:
            with unpacked(path, _HINT, MOST_BYTES) as file:
                text = file.read()
            try:
                check(text, "folder", path, self.root, unpacked=True, arrays=self.arrays)
                checked_text(text, self.encoding, path)
            except DataError as error:
                yield Document(path, None, problem=error)
                continue
            if self.separator is None:
                yield Document(path, text)
            else:
                yield from _split(text, self.separator.encode(), path)


def folder_blocks(data: schema.Data, sized: bool = True) -> list[Block]:
    """Split the files of each folder into blocks of 64 files. Raises DataError for a file whose size is not known.

    Without `sized`, files are not looked up, and the size of each block is 0.
    """
    return _blocks(folder_files(data), data, sized)


def folder_sample(data: schema.Data, sample: int | None, seed: int) -> tuple[list[Block], float]:
    """Choose `sample` random files of folders; without `sample`, all files, but at most 100,000.

    Returns blocks of 64 files, and the fraction of all files that they contain.
    """
    folders = folder_files(data)
    if data.separator is not None or LINES in data.paths:  # how many documents a file has shows when it is read
        return sample_blocks(_blocks(folders, data), sample, seed)
    total = sum(len(names) for _, names in folders)
    count = min(total, sample or _MOST_FILES)
    chosen, kept, first = choose(total, count, seed), list[tuple[Path, list[str]]](), 0
    for root, names in folders:
        inside = chosen[(chosen >= first) & (chosen < first + len(names))] - first
        kept.append((root, [names[number] for number in inside.tolist()]))
        first += len(names)
    return _blocks(kept, data), count / total


def _blocks(folders: list[tuple[Path, list[str]]], data: schema.Data, sized: bool = True) -> list[Block]:
    blocks, arrays = list[Block](), data.pattern.endswith(".json")
    parts = list[tuple[Path, list[str], str | None]]()  # with the separator of each
    for path, (root, names) in zip(data.paths, folders, strict=True):
        if path == LINES:
            rest = [name for number, name in enumerate(names) if number % _WHOLE]
            parts += [(root, names[::_WHOLE], None), (root, rest, "\n")]
        else:
            parts.append((root, names, data.separator))
    for root, names, separator in parts:
        for first in range(0, len(names), _BLOCK_FILES):
            some = "\0".join(names[first : first + _BLOCK_FILES])
            block = FolderBlock(str(root), some, data.encoding, arrays, separator, 0)
            length = sum(file_size(path, _HINT) for path in block.files) if sized else 0
            blocks.append(replace(block, length=length))
    return blocks
