"""What is free of this machine's memory: of all of it, or of what the container or job may use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def free_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return the bytes that a process may still take, caches given up; None where the system does not say.

    Limits of cgroup v1 are not seen.
    """
    return min([*_available(proc), *_allowed(proc, cgroups)], default=None)


def _available(proc: Path) -> Iterator[int]:
    with suppress(OSError):
        lines = (proc / "meminfo").read_text().splitlines()
        yield from (1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def _allowed(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield what each group of processes (cgroup v2) that this one belongs to may still take."""
    with suppress(OSError):
        names = [line[3:] for line in (proc / "self" / "cgroup").read_text().splitlines() if line.startswith("0::")]
        for group in [cgroups / name.strip("/") for name in names]:
            for folder in (group, *group.parents):
                yield from _left(folder)


def _left(group: Path) -> Iterator[int]:
    with suppress(OSError, ValueError):  # the topmost has no limit, and "max" is none
        most, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (group / "memory.stat").read_text().splitlines()
        cached = [line for line in lines if line.startswith(("active_file ", "inactive_file "))]
        yield max(0, most - used + sum(int(line.split()[1]) for line in cached))
