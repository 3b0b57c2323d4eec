"""Writes files atomically: complete or absent, even after a full disk, a signal or a power loss.

Links that other users may have put in the place of a file are not followed. Folders: folders.py.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

LOCK = ".lock"
_LOOKS, _LOOK_S = 10, 0.01  # how often and how long `locked` waits for a reader that tests the lock
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_BLOBS = re.compile(r"((?:\.\./)+blobs)/(\w+)")  # a link of the Hugging Face hub's cache


def write_durably(path: Path, content: bytes) -> None:
    """Write a file atomically and durably: write a temporary file, fsync and rename it, then fsync the folder.

    Raises OSError; an existing file is then unchanged.
    """
    # In a folder that others may write to, a name that can be guessed could be a link of theirs to a file of this user.
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
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


def append(path: Path) -> BinaryIO:
    """Open a file to write at its end; it is created if it is missing. Raises OSError, also for a link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(_regular(os.open(path, flags, 0o666), path), "ab")


def copy(source: Path, target: Path) -> None:
    """Copy a file to a new one, durably. No user who may not read `source` may read the copy.

    Raises OSError (ELOOP) for a link: another user could have a file of ours copied to a place where it can be read.
    Links of the cache of the Hugging Face hub are followed to its folder `blobs`, and no further.
    """
    with os.fdopen(_open_copied(source), "rb") as file, new_file(target) as made:
        # By these paths, `copyfile` reads and writes what has been opened.
        shutil.copyfile(f"/proc/self/fd/{file.fileno()}", f"/proc/self/fd/{made.fileno()}")
        before, now = os.fstat(file.fileno()), os.fstat(made.fileno())
        all_may = before.st_mode & stat.S_IRWXO
        of_group = before.st_mode & stat.S_IRWXG if before.st_gid == now.st_gid else all_may << 3
        os.fchmod(made.fileno(), stat.S_IMODE(now.st_mode & (stat.S_IRWXU | of_group | all_may)))
        os.fsync(made.fileno())


def _open_copied(source: Path) -> int:
    """Open a file that is copied, and return its descriptor."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return _regular(os.open(source, flags), source)
    except OSError as error:
        link = _BLOBS.fullmatch(str(source.readlink())) if error.errno == errno.ELOOP else None
        if link is None:
            raise
    blobs = os.open(source.parent / link[1], os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _regular(os.open(link[2], flags, dir_fd=blobs), source)
    finally:
        os.close(blobs)


def _regular(handle: int, path: Path) -> int:
    """Return the descriptor of a file. Closes it and raises OSError if it is a device, a pipe or a folder."""
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise PermissionError(errno.EACCES, "is not a regular file", str(path))
    return handle


def free_name(path: Path) -> Path:
    """Return the first of `NAME.1`, `NAME.2`, ... next to `path` that does not exist."""
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
    """Return whether no other user can have made a folder, or a link in its place, nor can put another one there.

    That is so if only one user may write to the folder around it; or if that has the sticky bit, as /tmp, and this
    folder is this user's, and only this user may write to it.
    """
    around = folder.parent.stat()
    if not around.st_mode & _OTHERS:
        return True
    found = folder.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS
    return ours and bool(around.st_mode & stat.S_ISVTX)


@contextmanager
def locked(path: Path, mode: int | None = None) -> Iterator[None]:
    """Lock a file, which is created, with the permissions `mode`, if it does not exist.

    The kernel releases the lock when this process ends, however it ends. Raises BlockingIOError if another process has
    locked the file, OSError if it is a link, which another user may have put there. Nothing in the file is changed.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        try:
            handle = os.open(path, flags)
        except FileNotFoundError as error:
            raise BlockingIOError(f"{path} was removed by the process that locked it") from error
        mode = None
    with os.fdopen(_regular(handle, path), "r+b") as file:
        if mode is not None:
            with suppress(PermissionError):  # the file system has no permissions
                os.fchmod(file.fileno(), mode)
        # Before our lock its last owner may have removed the file, or renamed its folder. Then another process may have
        # locked a new file of the same name. NFS has no files without a name (ESTALE).
        same = False
        try:
            _lock(file)
            same = os.path.samestat(os.fstat(file.fileno()), path.lstat())
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        if not same:
            raise BlockingIOError(f"{path} was removed by the process that locked it")
        yield


def _lock(file: IO[bytes]) -> None:
    """Lock a file. Tries more than once, since `engine.run.status.is_locked` shares the lock for a moment."""
    for _ in range(_LOOKS):
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOOK_S)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
