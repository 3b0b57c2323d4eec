"""Folders of token files of blocks: `data.cache`, and those in which `data pack` collects the parts of a file.

```
 CACHE/ab/ab12...ef.idx, .bin, .mask, .hash, .json   the token file of a block; .mask is seldom there
          ab12...ef.lock                             while it is written or removed
          .writing-ab12...ef.RANDOM/                 what is being written (Note: [shared folders] in folders.py)
       .identity                                     tells whether hosts share the folder
       .writing-ranks.RANDOM/                        rank files of a run whose hosts do not (runtime/hosts.py)
```
Users may share such a folder, so its contents get the permissions of the folder, whatever the umask.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from engine import files
from engine.config import schema
from engine.folders import drafting, entered, inside, names, opened, remove_drafts

ENDINGS = (".idx", ".bin", ".mask", ".hash", ".json")  # of the files of a block; .mask is seldom there
RANKS = "ranks"  # the draft with the rank files of a run
IDENTITY = ".identity"  # the file with that of the folder
_TRIES, _PAUSE_S = 50, 0.1  # to read or write it, while other hosts do
_PART = re.compile(
    rf"([0-9a-f]{{32}})(?:{'|'.join(map(re.escape, (*ENDINGS, '.lock')))})|\.writing-([0-9a-f]{{32}})\.\w+"
)


def cache_folder(data: schema.Data) -> Path:
    """The folder for token files of blocks that training reads: `data.cache`, or one in the user's cache folder."""
    if data.cache is not None:
        return Path(data.cache)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "bytescale" / "tokens"


def identity_of(cache: Path) -> str:
    """Return the identity of a cache folder, 32 hexadecimal digits: hosts with the same one share the folder.

    It is written when it is first asked for. Where that is not allowed, hosts with the same path have the same one:
    caches in which nothing can be written serve a run only if all blocks are packed, and then need no other host.
    Raises OSError if the folder cannot be created or read.
    """
    with opened(cache, make=True) as folder:
        path = inside(folder) / IDENTITY
        for left in reversed(range(_TRIES)):
            try:
                with suppress(FileNotFoundError):
                    found = path.read_text(encoding="ascii", errors="replace")
                    if re.fullmatch("[0-9a-f]{32}", found):
                        return found
                    if left > 1:  # another host may be writing it
                        time.sleep(_PAUSE_S)
                        continue
                    path.unlink()  # damaged
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:  # that of another host
                continue
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                    raise
                break
            with os.fdopen(handle, "w", encoding="ascii") as file:
                _share(handle, _mode(folder))
                file.write(secrets.token_hex(16))
    return blake2b(str(cache).encode(), digest_size=16).hexdigest()


@contextmanager
def folder_of(part: Path) -> Iterator[int]:
    """Open the folder of a block's token file `part`, which is created, in a cache folder; yield its descriptor.

    Raises OSError, also if a link is in its place.
    """
    with opened(part.parent.parent, make=True) as cache:
        with suppress(FileExistsError):
            try:
                os.mkdir(part.parent.name, 0o700, dir_fd=cache)
            except OSError as error:
                error.filename = str(part.parent)  # not only its name
                raise
        with entered(cache, part.parent.name) as folder:
            found, mode = os.fstat(folder), stat.S_IMODE(os.fstat(cache).st_mode)
            # We have just made it, or were killed before this. One with files may be another folder of ours.
            if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != mode and not names(folder):
                _share(folder, mode)
            yield folder


@contextmanager
def locked_part(folder: int, name: str) -> Iterator[None]:
    """Lock the files of a block in an open folder, to write or remove them. Raises BlockingIOError if that has been
    done.

    It only saves work. On a network file system whose locks are seen by one host alone, several hosts may pack a block:
    each in a separate draft, and all get the same files.
    """
    lock = inside(folder) / f"{name}.lock"
    with files.locked(lock, _mode(folder)):  # shared: if this process is killed, another user's can lock it
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def write_part(folder: int, name: str, write: Callable[[Path], None]) -> None:
    """Let `write(prefix)` write the files of a block into a draft, and rename them into the open folder.

    A process that is killed leaves the draft, until `spool.trim` removes it.
    """
    place = inside(folder) / name
    with drafting(place, folder, cleans=False) as draft:
        write(draft.path / name)
        for path in draft.path.iterdir():
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _share(handle, _mode(folder))
            finally:
                os.close(handle)
        move_into_place(draft.path, place, ENDINGS)


def move_into_place(draft: Path, prefix: Path, endings: Sequence[str]) -> None:
    """Rename the files of a token file from the folder `draft` to `prefix`, the first of `endings` last.

    A file of another ending is a rest of earlier files, and is removed.
    """
    for ending in reversed(endings):
        written, path = draft / f"{prefix.name}{ending}", Path(f"{prefix}{ending}")
        if written.exists():
            written.replace(path)
        else:
            path.unlink(missing_ok=True)
    files.sync(prefix.parent)


def _mode(folder: int) -> int:
    """The permissions of files in an open folder. In one such as /tmp, users change only their own files."""
    mode = os.fstat(folder).st_mode
    return stat.S_IMODE(mode) & (0o644 if mode & stat.S_ISVTX else 0o666)


def _share(handle: int, mode: int) -> None:
    """Give permissions to a file or folder that this process has made and opened."""
    with suppress(PermissionError):  # the file system has no permissions
        os.fchmod(handle, mode)


class Found(NamedTuple):
    """A file or a draft of a block, in a cache folder."""

    part: str  # name of the block's token file
    bytes: int
    changed: float  # in seconds since 1970


def found_in(cache: int) -> Iterator[Found]:
    """Yield the files and drafts of blocks in an open cache folder. Nothing else is looked at."""
    for number in range(256):
        with suppress(OSError), entered(cache, f"{number:02x}") as folder:  # it is missing, or is removed now
            for entry in names(folder):
                ours = _PART.fullmatch(entry)
                part = ours and (ours[1] or ours[2])
                if not part or not part.startswith(f"{number:02x}"):
                    continue
                with suppress(OSError):  # another process has removed it
                    found = os.stat(entry, dir_fd=folder, follow_symlinks=False)
                    size = found.st_size
                    if stat.S_ISDIR(found.st_mode):
                        size = sum(one.stat().st_size for one in (inside(folder) / entry / part).glob("*"))
                    yield Found(part, size, found.st_mtime)


def remove_part(cache: int, part: str) -> None:
    """Remove the token file of a block and its drafts from an open cache folder.

    Raises BlockingIOError if another process is writing it, OSError if it cannot be removed.
    """
    with (
        entered(cache, part[:2]) as folder,
        locked_part(folder, part),
    ):  # no process writes these files; they may be read
        for ending in ENDINGS:  # the index first, which marks the file as complete
            (inside(folder) / f"{part}{ending}").unlink(missing_ok=True)
        remove_drafts(folder, part)


def remove_parts(cache: int) -> None:
    """Remove the token files of all blocks and their folders from an open folder; other files stay. Raises OSError."""
    for part in {found.part for found in found_in(cache)}:
        remove_part(cache, part)
    for number in range(256):
        with suppress(OSError):  # it is missing, or has other files
            os.rmdir(f"{number:02x}", dir_fd=cache)
