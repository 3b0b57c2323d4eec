"""Writes files and folders atomically: complete or absent, even after a full disk, a signal or a power loss."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import IO, Any, BinaryIO

LOCK = ".lock"
_LOOKS, _LOOK_S = 10, 0.01  # how often and how long `locked` waits for a reader that tests the lock
_DRAFT, _RETIRED = ".writing-", ".removing-"


def write_durably(path: Path, content: bytes) -> None:
    """Write a file atomically and durably: write a temporary file, fsync and rename it, then fsync the folder.

    Raises OSError; an existing file is then unchanged.
    """
    # In a folder that others may write to, a name that can be guessed could be a link of theirs to a file of this user.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk gets its space back
        raise
    sync(path.parent)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object durably."""
    write_durably(path, (json.dumps(value) + "\n").encode())


def new_file(path: Path) -> BinaryIO:
    """Open a new file for writing, in place of what is at `path`, even if that is a link to another file."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def free_name(path: Path) -> Path:
    """Return the first of `NAME.1`, `NAME.2`, ... beside `path` that does not exist."""
    number = 1
    while (free := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return free


def sync(path: Path) -> None:
    """fsync a file, or a folder, which makes new, renamed and removed entries durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_own(folder: Path) -> bool:
    """Return whether no other user can have made a folder, or a link in its place.

    That is so if not everybody may write to the folder around it, or if it is this user's.
    """
    if not folder.parent.stat().st_mode & stat.S_IWOTH:
        return True
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & stat.S_IWOTH


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file, which is created if it does not exist. Raises BlockingIOError if another process has locked it.

    The kernel releases the lock when this process ends, however it ends. Raises OSError if the file is a link, which
    another user may have put there. Nothing in the file is changed.
    """
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)) as file:
        # Before our lock its last owner may have removed the file, or renamed its folder. Then another process may have
        # locked a new file of the same name. NFS has no files without a name (ESTALE).
        same = False
        try:
            _lock(file)
            same = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        if not same:
            raise BlockingIOError(f"{path} was removed by the process that locked it")
        yield


def _lock(file: IO[str]) -> None:
    """Lock a file. Tries more than once, since `engine.run.status.is_locked` shares the lock for a moment."""
    for _ in range(_LOOKS):
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOOK_S)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def draft_of(final: Path) -> Path:
    """Return the temporary path of the folder `final` while it is being written."""
    return final.with_name(f"{_DRAFT}{final.name}")


@contextmanager
def locked_draft(final: Path) -> Iterator[Path]:
    """Create an empty draft of the folder `final`, lock it, and yield its path; the caller fills and publishes it.

    A draft that is not published stays on disk, and the next writer of `final` empties it. Raises BlockingIOError if
    another process is writing the same folder, OSError if another user has made the draft: it could be a link to a
    folder of ours, which would be emptied.
    """
    draft = draft_of(final)
    draft.mkdir(parents=True, exist_ok=True)
    if not is_own(draft):
        raise OSError(errno.EEXIST, "another user has made this folder", str(draft))
    with locked(draft / LOCK):
        for left in draft.iterdir():
            if left.is_dir():
                shutil.rmtree(left)
            elif left.name != LOCK:
                left.unlink()
        yield draft


def publish(draft: Path, final: Path) -> None:
    """Rename a draft folder to `final` and remove its lock file, if it has one.

    The caller must have synced the files; this function syncs the folders. Raises OSError if `final` is a file or not
    empty.
    """
    for folder in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
        sync(folder)
    draft.rename(final)
    (final / LOCK).unlink(
        missing_ok=True
    )  # after the rename: else a second writer could create and lock a new file in the draft
    sync(final)
    sync(final.parent)


def remove_folder(folder: Path) -> None:
    """Rename a folder, so that `remove_ruins` finds it, and remove it: no incomplete folder of that name is left."""
    shutil.rmtree(folder.rename(folder.with_name(f"{_RETIRED}{folder.name}")))


def remove_ruins(*parents: Path) -> None:
    """Remove the drafts and half-removed folders that killed processes left in `parents`.

    What a process still has open on NFS stays until the next call.
    """
    for parent, prefix in product(parents, (_RETIRED, _DRAFT)):
        for ruin in parent.glob(f"{prefix}*"):
            try:
                shutil.rmtree(ruin)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
                    raise
