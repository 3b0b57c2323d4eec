"""Writes and removes folders in places where other users may create, rename and replace entries at any moment.

Note: [shared folders]. A path says what is there now, so between two uses of it another user can put a link, or another
folder of ours, in its place. Whatever is written, removed or given permissions is therefore reached through
descriptors, which stay with the folder that was opened: `inside` makes paths of them. A draft is in a folder of mode
0700 with a name that cannot be guessed:

```
 FOLDER/.writing-NAME.RANDOM/.draft   the mark, locked by its writer
                             NAME/    what is written, with the permissions of the umask; `publish` renames it
        .removing-NAME.RANDOM/...     a folder that is being removed
```
Drafts left by killed processes are recognized by their mark: it cannot be moved out of a draft nor into another folder
of ours. Entries that belong to another user, or are locked, stay. Group-writable counts as writable by others.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from engine.files import sync

MARK = ".draft"
_NAME = re.compile(r"\.(?:writing|removing)-(.+)\.[0-9a-f]{16}")
_OPENED = re.compile(r"/proc/self/fd/(\d+)(.*)", re.DOTALL)
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_TRIES = 100  # a process that removes drafts may take a new one, before it is locked, for one of a killed process


def random_name() -> str:
    """Return 16 hex digits that no one can guess: the end of a draft's name."""
    return secrets.token_hex(8)


def inside(handle: int) -> Path:
    """The path of an open folder, whatever happens to its name. Valid in this process, as long as it is open."""
    return Path(f"/proc/self/fd/{handle}")


def names(handle: int) -> list[str]:
    """Return the names of the entries of an open folder."""
    return [path.name for path in inside(handle).iterdir()]


@contextmanager
def opened(folder: Path, make: bool = False, follow_links: bool = True) -> Iterator[int]:
    """Open a folder and yield its descriptor; `make` creates it and its parents.

    A link in its place is followed; without `follow_links`, only if this user or root made it. An
    OSError inside the context names real paths. Raises OSError (ELOOP for a link of another user).
    """
    if make:
        folder.mkdir(parents=True, exist_ok=True)
    place = folder
    if not follow_links:
        found = os.open(folder, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if stat.S_ISLNK(os.fstat(found).st_mode):
                if os.fstat(found).st_uid not in (0, os.geteuid()):
                    raise OSError(errno.ELOOP, "is a link that another user has made", str(folder))
                place = folder.parent / os.readlink("", dir_fd=found)
        finally:
            os.close(found)
    handle = os.open(place, _FOLDER | (0 if follow_links or place != folder else os.O_NOFOLLOW))
    with _closing(handle):
        yield handle


@contextmanager
def entered(parent: int, name: str) -> Iterator[int]:
    """Open a folder in an open one, which must not be a link, and yield its descriptor. Raises OSError."""
    with _closing(_open(name, _FOLDER | os.O_NOFOLLOW, parent)) as handle:
        yield handle


@contextmanager
def opened_file(folder: int, file: str) -> Iterator[Path]:
    """Open a file below an open folder to read it, and yield its path, as `inside`. No part of `file` may be a link.

    Raises OSError.
    """
    *folders, name = Path(file).parts
    with ExitStack() as stack:
        for one in folders:
            folder = stack.enter_context(entered(folder, one))
        handle = _open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, folder)
        yield inside(stack.enter_context(_closing(handle)))


def _open(name: str, flags: int, parent: int) -> int:
    """Open an entry of an open folder. Raises OSError with its real path."""
    try:
        return os.open(name, flags, dir_fd=parent)
    except OSError as error:
        error.filename = real(inside(parent) / name)
        raise


@contextmanager
def _closing(handle: int) -> Iterator[int]:
    """Close a descriptor at the end. Errors inside name real paths instead of the descriptor's."""
    try:
        yield handle
    except OSError as error:
        _name_real(error)
        raise
    finally:
        os.close(handle)


def _name_real(error: OSError) -> None:
    """Let an error name the real path of its file, if that is still open."""
    if (known := real(error.filename)) != error.filename:
        error.filename = known


def real(path: Any) -> Any:
    """Return a path below `inside` as people know it; anything else unchanged."""
    found = _OPENED.fullmatch(os.fspath(path)) if isinstance(path, str | os.PathLike) else None
    if found is not None:
        with suppress(OSError):
            return f"{inside(int(found[1])).readlink()}{found[2]}"
    return path


class Draft:
    """A folder that is being written; see the note above. Has descriptors, until `close` or the end of `drafting`."""

    def __init__(self, parent: int, name: str, draft: str, joins: bool = False) -> None:
        """Open the draft named `draft` in the open folder `parent`. `joins`: another process may have begun it.

        Raises OSError if another user has put something in its place.
        """
        self.name = name
        self._parent, self._draft = parent, draft
        self._lock: int | None = None
        self._content: int | None = None
        self._outer = _open(draft, _FOLDER | os.O_NOFOLLOW, parent)
        try:
            left, flags = names(self._outer), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
            ours = not left
            if ours:
                with suppress(FileExistsError):
                    self._lock = os.open(MARK, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._outer)
            if self._lock is None and joins:
                self._lock = os.open(MARK, flags, dir_fd=self._outer)
                ours = _is_ours(self._outer)
            if self._lock is None or not (ours and _is_private(self._outer, self._lock)):
                raise PermissionError(errno.EACCES, "another user has made this folder", str(self.place))
        except BaseException:
            self.close()
            raise

    @classmethod
    def new(cls, parent: int, name: str, verb: str = "writing") -> Draft:
        """Make a draft, and lock it. Raises OSError."""
        for _ in range(_TRIES):
            draft = f".{verb}-{name}.{random_name()}"
            os.mkdir(draft, 0o700, dir_fd=parent)
            with suppress(FileNotFoundError, BlockingIOError):
                made = cls(parent, name, draft)
                try:
                    made.lock()
                except BaseException:
                    made.close()
                    raise
                return made
        raise OSError(errno.EBUSY, "drafts are removed as soon as they are made", str(inside(parent) / name))

    @classmethod
    def shared(cls, parent: int, name: str, token: str) -> Draft:
        """Make or open the draft that several processes of this user write, with an agreed `token` of `random_name`."""
        draft = f".writing-{name}.{token}"
        with suppress(FileExistsError):
            os.mkdir(draft, 0o700, dir_fd=parent)
        return cls(parent, name, draft, joins=True)

    def lock(self) -> None:
        """Lock the draft. Raises BlockingIOError if another process has locked or removed it."""
        assert self._lock is not None
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(self._lock).st_nlink:
            raise BlockingIOError(errno.EAGAIN, "was removed", str(self.place))

    @property
    def place(self) -> Path:
        """Where the draft is, for messages."""
        return Path(real(inside(self._parent))) / self._draft

    @property
    def path(self) -> Path:
        """The folder to write into, which is created; valid in this process until the draft is closed."""
        if self._content is None:
            with suppress(FileExistsError):
                os.mkdir(self.name, dir_fd=self._outer)
            self._content = os.open(self.name, _FOLDER | os.O_NOFOLLOW, dir_fd=self._outer)
        return inside(self._content)

    def take(self, name: str) -> None:
        """Move an entry of the folder around the draft into it: a folder to remove. Raises OSError."""
        os.rename(name, name, src_dir_fd=self._parent, dst_dir_fd=self._outer)

    def publish(self) -> None:
        """Rename the content to its place, and remove the rest of the draft. The caller must have synced the files.

        Raises OSError if there is a file, a link, or a folder that is not empty.
        """
        for folder in (self.path, *(path for path in self.path.rglob("*") if path.is_dir())):
            sync(folder)
        try:
            os.rename(self.name, self.name, src_dir_fd=self._outer, dst_dir_fd=self._parent)
        except OSError as error:
            place = Path(real(inside(self._parent))) / self.name
            raise OSError(error.errno, os.strerror(error.errno or 0), str(place)) from error
        os.fsync(self._parent)
        self.discard()

    def discard(self) -> None:
        """Remove the draft with all that is in it, the mark last, and close it. Raises OSError."""
        for name in names(self._outer):
            if name != MARK:
                _remove(self._outer, name)
        os.unlink(MARK, dir_fd=self._outer)
        self.close()  # on NFS an open file stays, under another name
        with suppress(OSError):  # another user has moved it
            os.rmdir(self._draft, dir_fd=self._parent)

    def close(self) -> None:
        """Close the descriptors, and with them the lock. What is on disk stays."""
        for handle in (self._content, self._outer, self._lock):
            if handle is not None:
                with suppress(OSError):
                    os.close(handle)
        self._content = self._lock = None
        self._outer = -1

    @property
    def closed(self) -> bool:
        """Whether the draft was published, discarded or closed."""
        return self._outer < 0


def _is_private(folder: int, mark: int) -> bool:
    """Return whether the user who made the file `mark` has made its folder too, and no other user may enter it.

    File systems without permissions, or that map users, are no exception: there both have the same wrong ones.
    """
    around, file = os.fstat(folder), os.fstat(mark)
    if not stat.S_ISREG(file.st_mode) or around.st_uid != file.st_uid:
        return False
    return not around.st_mode & _OTHERS or bool(file.st_mode & _OTHERS)


def _is_ours(folder: int) -> bool:
    """Return whether this user has made an open folder, also if the file system maps this user to another one."""
    owner = os.fstat(folder).st_uid
    if owner == os.geteuid():
        return True
    probe = random_name()
    try:
        handle = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError:
        return False
    try:
        return os.fstat(handle).st_uid == owner
    finally:
        os.unlink(probe, dir_fd=folder)
        os.close(handle)


def _remove(parent: int, name: str) -> None:
    """Remove an entry of an open folder, with all that is in it. Links are not followed."""
    if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        shutil.rmtree(inside(parent) / name)
    else:
        os.unlink(name, dir_fd=parent)


@contextmanager
def drafting(final: Path, parent: int | None = None, cleans: bool = True) -> Iterator[Draft]:
    """Make a draft of the folder `final`; the caller fills `path` and calls `publish`. Else it is removed at the end.

    `parent` is the open folder around it; without it that is opened, and created if it is missing. It `cleans`: drafts
    of `final` that killed processes have left are removed first. Raises BlockingIOError if another process of this user
    is writing the same folder, OSError if there can be no draft.
    """
    if parent is None:
        with opened(final.parent, make=True) as around, drafting(final, around) as draft:
            yield draft
        return
    if cleans and remove_drafts(parent, final.name):
        raise BlockingIOError(errno.EAGAIN, "another process is writing this folder", str(final))
    draft = Draft.new(parent, final.name)
    try:
        yield draft
    except OSError as error:
        _name_real(error)
        raise
    finally:
        if not draft.closed:
            with suppress(OSError):
                draft.discard()
            draft.close()


@contextmanager
def temporary(parent: Path | None, prefix: str, keeps: tuple[type[BaseException], ...] = ()) -> Iterator[Path]:
    """Make a folder in `parent`, by default the system's for temporary files, and remove it at the end.

    An exception that it `keeps` leaves it. Unlike that of `tempfile.TemporaryDirectory`, the removal cannot be led to
    another folder of this user. Raises OSError if there can be no folder.
    """
    made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with opened(made.parent) as around, entered(around, made.name) as handle:
        if names(handle):
            raise PermissionError(errno.EACCES, "another user has put another folder here", str(made))
        try:
            yield made
        except keeps:
            raise
        except BaseException:
            _empty(around, made.name, handle)
            raise
        _empty(around, made.name, handle)


def _empty(parent: int, name: str, handle: int) -> None:
    """Remove an open folder, as far as possible."""
    with suppress(OSError):
        for entry in names(handle):
            _remove(handle, entry)
        os.rmdir(name, dir_fd=parent)


def remove_folder(folder: Path) -> None:
    """Rename a folder, so that `remove_ruins` finds it, and remove it: no incomplete folder of that name is left.

    A link in its place is removed instead. Raises OSError.
    """
    with opened(folder.parent, follow_links=False) as parent:
        remove_drafts(parent, folder.name)
        draft = Draft.new(parent, folder.name, "removing")
        try:
            draft.take(folder.name)
        except OSError as error:
            draft.discard()
            raise OSError(error.errno, os.strerror(error.errno or 0), str(folder)) from error
        try:
            draft.discard()
        finally:
            draft.close()


def remove_ruins(*parents: Path) -> None:
    """Remove the drafts and half-removed folders that killed processes left in `parents`.

    What a process still has open on NFS stays until the next call.
    """
    for parent in parents:
        with suppress(FileNotFoundError), opened(parent, follow_links=False) as handle:
            remove_drafts(handle)


def remove_drafts(parent: int, name: str | None = None) -> bool:
    """Remove what killed processes of this user have left in an open folder: all drafts, or those of `name`.

    Returns whether another process is writing one of them.
    """
    busy = False
    for entry in names(parent):
        found = _NAME.fullmatch(entry)
        if found is None or name not in (None, found[1]):
            continue
        try:
            outer = os.open(entry, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
        except OSError:  # a link, a file, a folder of another user, or it was removed
            continue
        try:
            busy |= _remove_draft(parent, entry, outer)
        finally:
            os.close(outer)
    return busy


def _remove_draft(parent: int, entry: str, outer: int) -> bool:
    """Remove an open draft if it is ours and no process writes it. Returns whether a process does."""
    try:
        mark = os.open(MARK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=outer)
    except OSError as error:
        if error.errno == errno.ENOENT and os.fstat(outer).st_uid == os.geteuid():
            with suppress(OSError):  # unless it is empty, it is none of ours
                os.rmdir(entry, dir_fd=parent)
        return False
    try:
        if not (_is_private(outer, mark) and _is_ours(outer)):
            return False
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            for name in names(outer):
                if name != MARK:
                    _remove(outer, name)
            with suppress(FileNotFoundError):
                os.unlink(MARK, dir_fd=outer)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
                raise
    except BlockingIOError:
        return True
    finally:
        os.close(mark)
    with suppress(OSError):
        os.rmdir(entry, dir_fd=parent)
    return False
