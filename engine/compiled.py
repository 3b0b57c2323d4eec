"""The `njit` decorator for compiled functions, and the folder of their machine code.

numba caches the machine code of a function next to its source file and recompiles it when that file changes, but not
when a function that it calls changes in another file. After an update some ranks would plan with old formulas. So the
cache folder is named by a digest of all sources that compiled code depends on: a new version gets a new folder.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numba
from numba import config
from numba.core import event

_PACKAGES = ("cost", "planner")  # packages of the engine that define compiled functions
_MODULES = ("units.py",)  # modules whose constants are frozen into compiled code
_ENGINE = Path(__file__).parent


def _digest(engine: Path = _ENGINE) -> str:
    """Hash all sources that compiled code depends on, as 16 hex digits."""
    files = sorted(path for package in _PACKAGES for path in (engine / package).rglob("*.py"))
    files += [engine / module for module in _MODULES]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _folder(homes: list[Path]) -> Path:
    """Create the folder of this version's machine code in the first writable folder of `homes`; return its path.

    If no folder is writable, returns a path in the last one.
    """
    name = f"compiled-{_digest()}"
    for home in homes:
        try:
            (home / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(home / name, os.W_OK):
            return home / name
    return homes[-1] / name  # numba reports why it cannot write there


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
