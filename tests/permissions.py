"""Lets tests that run as root meet files that they may not read."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_VERSION = 0x20080522  # of the kernel's capability structures
_OVERRIDES = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH


@contextmanager
def locked_out(path: Path, mode: int = 0) -> Iterator[None]:
    """Give a path this mode, and this thread no capability that overrides it. Restores both."""
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable of capabilities 0 to 31; then of 32 to 63
    assert libc.capget(header, sets) == 0, os.strerror(ctypes.get_errno())
    effective, before = sets[0], path.stat().st_mode
    path.chmod(mode)
    sets[0] = effective & ~_OVERRIDES
    assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        sets[0] = effective
        assert libc.capset(header, sets) == 0, os.strerror(ctypes.get_errno())
        path.chmod(before)
