"""Keeps a folder of token files of blocks below a size: the least recently used blocks are evicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from engine.data.cache import found_in, remove_part
from engine.folders import opened

MARGIN = 1 / 16  # of the spool: it is removed too when the spool is full, so that a folder is seldom listed


def trim(folder: Path, limit: int, kept: Container[Path]) -> int:
    """Remove token files of blocks, those first that were not used for the longest time, if they exceed `limit` bytes.

    They are reduced to 15/16 of `limit`. Those whose prefix is in `kept` stay, those of other users, and those that
    another process is packing. A run that needs a removed block packs it again. Returns the bytes that are left. Files
    that are not ours are neither counted nor removed: `data.cache` may be a folder that contains others.
    """
    used, sizes, total = dict[str, float](), defaultdict[str, int](int), 0
    with suppress(FileNotFoundError), opened(folder) as cache:
        for found in found_in(cache):
            used[found.part] = max(found.changed, used.get(found.part, 0))
            sizes[found.part] += found.bytes
        total = sum(sizes.values())
        if total <= limit:
            return total
        for part in sorted(used, key=lambda part: used[part]):
            if total <= limit * (1 - MARGIN):
                break
            if folder / part[:2] / part in kept:
                continue
            with suppress(OSError):
                remove_part(cache, part)
                total -= sizes[part]
    return total


def bytes_of(part: Path) -> int:
    """Return the bytes of the token file of a block; 0 if it could not be packed."""
    with suppress(OSError):
        return sum(path.stat().st_size for path in part.parent.glob(f"{part.name}.*"))
    return 0
