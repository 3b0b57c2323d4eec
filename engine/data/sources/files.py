"""File access for sources of documents. Every failure becomes a DataError that names the file.

Messages are written to follow the place: `docs/a.txt: is not UTF-8 at byte 7`. A path with `://` is a URL, which fsspec
opens, such as `s3://bucket/a.jsonl`; any other is a local path.
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, Literal

from engine.config import schema
from engine.data.sources.urls import is_url, kind_of_url, names_below_url, opened_url, stamp_of_url
from engine.errors import DataError

READABLE = "choose a path that this user can read"
NOWHERE = "no such file or folder", "set data.path to a file, a folder, or a glob such as 'data/*.jsonl'"


def kind(path: Path | str) -> Literal["folder", "file", "missing"]:
    """Return what a path refers to. Raises DataError if that cannot be determined, for example without permission."""
    try:
        if is_url(path):
            return kind_of_url(str(path))
        return "folder" if stat.S_ISDIR(Path(path).stat().st_mode) else "file"
    except (FileNotFoundError, NotADirectoryError):
        return "missing"
    except OSError as error:
        raise unreadable(path, error) from error


@contextmanager
def reading(path: Path | str, hint: str = READABLE) -> Iterator[BinaryIO]:
    """Open a regular file in binary mode, as a context. Raises DataError if opening it, or reading it later, fails."""
    if is_url(path):
        with opened_url(str(path)) as file:
            yield file
        return
    try:
        # Opening a named pipe would block until something writes to it.
        if not stat.S_ISREG(mode := Path(path).stat().st_mode):
            what = "is a named pipe, which can be read only once" if stat.S_ISFIFO(mode) else "is not a regular file"
            hint = "documents are read more than once: copy them into a file, and set data.path to it"
            raise DataError(what, key=str(path), hint=hint)
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error, hint) from error


def find(data: schema.Data) -> list[str]:
    """Return the files that the paths of `data.path` name: of each path in turn, sorted.

    Raises DataError if there are none for a path, or if a file is named twice.
    """
    found = [file for path in data.paths for file in find_below(path, data.pattern)]
    check_different(found)
    return found


def check_different(paths: Sequence[str]) -> None:
    """Raise DataError if a path is listed twice: its documents would be read twice in an epoch."""
    seen = set[str]()
    for path in paths:
        name = path if is_url(path) else os.path.normpath(path)
        if name in seen:
            raise DataError("is named twice by data.path", key=path, hint="remove one of the paths that name it")
        seen.add(name)


def find_below(path: str, pattern: str) -> list[str]:
    """Return the files that a path names, sorted.

    It is a file, a folder, whose files that match `pattern` are meant, or a glob like `data/*.jsonl`. Raises DataError
    if there are none.
    """
    found = kind(path)
    if found == "file":
        return [path]
    root, pattern = (path, pattern) if found == "folder" else split_glob(path)
    if not pattern or kind(root) != "folder":
        raise DataError(NOWHERE[0], key=path, hint=NOWHERE[1])
    names = sorted(below(root, pattern))
    if not names and found != "folder":
        hint = "correct the glob, for example data.path='data/*.jsonl'"
        raise DataError("matches no files", key=path, hint=hint)
    if not names:
        hint = "set data.pattern, for example data.pattern='**/*.json.gz'; data=folder reads texts"
        raise no_match(root, pattern, hint)
    return [posixpath.join(root, name) for name in names]


def no_match(root: Path | str, pattern: str, hint: str, skipped: AbstractSet[str] = frozenset()) -> DataError:
    """Create the DataError for a folder without a file that matches a pattern: it may have no files (see `below`)."""
    if any(True for _ in below(root, "**/*", skipped)):
        return DataError(f"contains no files that match {pattern!r}", key=str(root), hint=hint)
    return DataError("contains no files", key=str(root), hint="set data.path to a folder with files")


def split_glob(path: str) -> tuple[str, str]:
    """Split a glob into the folder that it begins with and a pattern below it; a path without `*?[` has no pattern."""
    magic = re.search(r"[*?[]", path)
    if not magic:
        return path, ""
    slash = path.rfind("/", 0, magic.start()) + 1
    return path[:slash] or ".", path[slash:]


def below(root: Path | str, pattern: str, skipped: AbstractSet[str] = frozenset()) -> Iterator[str]:
    """Yield the files below a folder that match a pattern, as POSIX paths relative to it, in no particular order.

    In a pattern `*` stays within one folder and `**` matches any number of folders. As in a shell, neither matches a
    name that begins with a dot: those are of tools, such as .git. Links to folders are not followed, and folders with a
    name in `skipped` are left out. Raises DataError for a folder that cannot be read.
    """
    if is_url(root):
        yield from (name for name in names_below_url(str(root)) if matches(name, pattern))
        return

    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error) from error

    for folder, subfolders, files in os.walk(root, onerror=refuse):
        relative = Path(folder).relative_to(root)
        subfolders[:] = [name for name in subfolders if name not in skipped and _leads(relative / name, pattern)]
        yield from (name for name in ((relative / file).as_posix() for file in files) if matches(name, pattern))


def count_hidden(root: Path | str, pattern: str, skipped: AbstractSet[str] = frozenset()) -> int:
    """Return how many files and folders `below` leaves out because their names begin with a dot, 0 for a URL.

    Those inside a hidden folder are not counted.
    """
    if is_url(root) or kind(root) != "folder":
        return 0
    count = 0
    for folder, subfolders, files in os.walk(root):
        relative = Path(folder).relative_to(root)
        folders = [name for name in subfolders if name not in skipped and _leads(relative / name, pattern, hidden=True)]
        subfolders[:] = [name for name in folders if _leads(relative / name, pattern)]
        names = [(relative / name).as_posix() for name in files if name.startswith(".")]
        count += len(folders) - len(subfolders)
        count += sum(matches(name, pattern, hidden=True) and not matches(name, pattern) for name in names)
    return count


def matches(name: str, pattern: str, hidden: bool = False) -> bool:
    """Return whether a POSIX path relative to the folder matches a pattern (see `below`).

    `hidden`: `*` and `**` also match names that begin with a dot. `Path.glob` is not used because its results for links
    and unreadable folders differ between Python versions.
    """

    def match(parts: Sequence[str], patterns: Sequence[str]) -> bool:
        if not patterns:
            return not parts
        if patterns[0] == "**":
            deeper = bool(parts) and (hidden or not parts[0].startswith("."))
            return match(parts, patterns[1:]) or (deeper and match(parts[1:], patterns))
        return bool(parts) and _fits(parts[0], patterns[0], hidden) and match(parts[1:], patterns[1:])

    return match(name.split("/"), pattern.split("/"))


def _fits(part: str, pattern: str, hidden: bool) -> bool:
    """Return whether a name matches a part of a pattern."""
    return fnmatchcase(part, pattern) and (hidden or pattern.startswith(".") or not part.startswith("."))


def _leads(folder: Path, pattern: str, hidden: bool = False) -> bool:
    """Return whether files in a folder, or below it, can match a pattern. Otherwise it need not be listed."""
    patterns = pattern.split("/")
    for number, (part, wanted) in enumerate(zip(folder.parts, patterns, strict=False)):
        if wanted == "**":
            named = hidden or any(one.startswith(".") for one in patterns)
            return named or not any(one.startswith(".") for one in folder.parts[number:])
        if not _fits(part, wanted, hidden):
            return False
    return len(folder.parts) < len(patterns)


def stamp(path: str) -> str:
    """Return what identifies the present content of a file without reading it, such as its size and time."""
    if is_url(path):
        return stamp_of_url(path)
    try:
        found = Path(path).stat()
        return f"{found.st_size} {found.st_mtime_ns}"
    except OSError as error:
        raise unreadable(path, error) from error


def file_size(path: str, hint: str = READABLE) -> int:
    """Return the bytes of a local file. Raises DataError if it cannot be looked up."""
    try:
        return Path(path).stat().st_size
    except OSError as error:
        raise unreadable(path, error, hint) from error


def unreadable(path: Path | str, error: OSError, hint: str = READABLE) -> DataError:
    """Create the DataError for a file or folder that cannot be read, with the reason of the OSError."""
    reason = error.strerror or str(error) or type(error).__name__
    return DataError(f"cannot be read: {reason}", key=str(path), hint=hint)
