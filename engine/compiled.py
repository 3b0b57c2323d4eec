"""The `njit` decorator for compiled functions, and the folder of their machine code.

numba caches the machine code of a function next to its source file and recompiles it when that file changes, but not
when a function that it calls changes in another file. After an update some ranks would plan with old formulas. The
cache folder is therefore named by a digest of all sources that compiled code depends on: a new version gets a new one.

numba unpickles the files in its cache, so a user who can write there can run code as the user of this process. A folder
below a shared one is used only if this user owns it, and no other user can replace it (`files.is_own`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import config
from numba.core import event
from numba.core.caching import IndexDataCacheFile

from engine.errors import StorageError
from engine.files import is_own

_PACKAGES = ("cost", "planner")  # packages of the engine that define compiled functions
# Modules that define some, too, or whose constants and options are frozen into compiled code.
_MODULES = ("units.py", "compiled.py", "data/draws.py")
_ENGINE = Path(__file__).parent
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _digest(engine: Path = _ENGINE) -> str:
    """Hash all sources that compiled code depends on, as 16 hex digits."""
    files = sorted(path for package in _PACKAGES for path in (engine / package).rglob("*.py"))
    files += [engine / module for module in _MODULES]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _folder(homes: list[Path]) -> Path:
    """Create the folder of this version's machine code in the first folder of `homes` that serves; return its path.

    Raises StorageError if there is none.
    """
    for home in homes:
        folder = home / f"compiled-{_digest()}"
        if _serves(home) and _serves(folder) and os.access(folder, os.W_OK):
            return folder
    hint = "set NUMBA_CACHE_DIR to a private folder"
    raise StorageError(f"no folder for compiled code can be used, of {', '.join(map(str, homes))}", hint=hint)


def _serves(folder: Path) -> bool:
    """Create a folder if it does not exist. Return whether no other user can have put something into it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)  # whatever the umask: a group could write into it
        return is_own(folder)
    except OSError:
        return False


class _First(event.Listener):
    """Calls `report` once, when numba starts its first compilation."""

    def __init__(self, report: Callable[[], None]) -> None:
        self.report = report

    def on_start(self, event: event.Event) -> None:
        report, self.report = self.report, lambda: None
        report()

    def on_end(self, event: event.Event) -> None:
        pass


def when_compiling(report: Callable[[], None]) -> None:
    """Arrange that `report` is called once, when this process compiles its first function from now on.

    If the machine code of all functions is cached on disk, it is never called.
    """
    event.register("numba:compile", _First(report))  # type: ignore[no-untyped-call]


_save = IndexDataCacheFile.save


def _save_alone(cache: IndexDataCacheFile, key: object, data: object) -> None:
    """`IndexDataCacheFile.save`, by one process at a time.

    It reads the function's index of types, chooses a free file name, and writes both. Two processes that compile a
    function for other types at once would choose the same file, and later ones would run the machine code of the other
    types.
    """
    with (Path(cache._cache_path) / "lock").open("ab") as lock:
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        _save(cache, key, data)  # type: ignore[no-untyped-call]


IndexDataCacheFile.save = _save_alone  # type: ignore[method-assign]

# Folders that may hold compiled code, best first: the user's choice, the package's, the user's cache.
_chosen = os.environ.get("NUMBA_CACHE_DIR")
_homes = [
    *([Path(_chosen)] if _chosen else []),
    _ENGINE / "__pycache__",
    Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "bytescale",
    Path(tempfile.gettempdir()) / f"bytescale-{os.getuid()}",
]
config.CACHE_DIR = str(_folder(_homes))  # type: ignore[attr-defined]
njit = numba.njit(cache=True)


def njit_in_place(function: _Function) -> _Function:
    """The `njit` of functions that allocate no array: it leaves out reference counts.

    These are atomic, and functions that pass many arrays on to each other spend most of their time on them. numba
    refuses to compile such a function if it does allocate an array. It may call other compiled functions, but none of
    numpy, nor a method of an array: numba compiles those with the options of their first caller in the process. So
    `values.max()` compiles here if a function of `njit` was compiled before, and fails if that came from the cache.
    """
    options: dict[str, Any] = {"_nrt": False}
    compiled: _Function = numba.njit(cache=True, **options)(function)
    return compiled
