"""Compiled kernels, and where their machine code is kept.

numba keeps a kernel's code beside its source and compiles it anew when that file changes, but not when a function that
it calls changes in another file. After an update some ranks would then plan by old formulas. So the code lies in a
folder named by a digest of all sources that hold kernels: another version, another folder.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from numba import config, njit
from numba.core import event

_SOURCES = ("cost", "planner")  # packages of the engine that hold kernels
_ENGINE = Path(__file__).parent


def _digest(engine: Path = _ENGINE) -> str:
    files = sorted(path for package in _SOURCES for path in (engine / package).glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def _homes() -> list[Path]:
    """Return folders that may hold compiled code: the user's choice, the package's, the user's cache."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "bytescale"
    others = [_ENGINE / "__pycache__", cache, Path(tempfile.gettempdir()) / f"bytescale-{os.getuid()}"]
    return [Path(chosen), *others] if chosen else others


def _folder(homes: list[Path]) -> Path:
    """Return the folder of this version's code in the first of `homes` that can be written to."""
    name = f"compiled-{_digest()}"
    for home in homes:
        try:
            (home / name).mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(home / name, os.W_OK):
            return home / name
    return homes[-1] / name  # numba says what is wrong with it


class _First(event.Listener):
    """Calls `tell` when numba first compiles something."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell = tell

    def on_start(self, event: event.Event) -> None:
        tell, self.tell = self.tell, lambda: None
        tell()

    def on_end(self, event: event.Event) -> None:
        pass


def when_compiling(tell: Callable[[], None]) -> None:
    """Call `tell` once, when the first kernel is compiled in this process: never if all lie compiled on disk."""
    event.register("numba:compile", _First(tell))  # type: ignore[no-untyped-call]


config.CACHE_DIR = str(_folder(_homes()))  # type: ignore[attr-defined]
kernel = njit(cache=True)
