"""Reads how much host memory this machine, and the container or job of this process, have in total and have left."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def total_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return the host memory in bytes, or the limit of the container or job if that is less; None if unknown.

    Unlike `available_bytes` it does not change while the machine runs. Limits of cgroup v1 are not read.
    """
    found = []
    with suppress(OSError):
        lines = (proc / "meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemTotal:")]
    for folder in own_groups(proc, cgroups):
        with suppress(OSError, ValueError):  # the root group has no such file, and "max" means no limit
            found.append(int((folder / "memory.max").read_text()))
    return min(found, default=None)


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return the bytes that can still be allocated, counting page caches as available; None if the system reports none.

    Limits of cgroup v1 are not read.
    """
    found = []
    with suppress(OSError):
        lines = (proc / "meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    for folder in own_groups(proc, cgroups):
        with suppress(OSError, ValueError):  # the root group has no such files, and "max" means no limit
            limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            lines = (folder / "memory.stat").read_text().splitlines()
            cached = [line for line in lines if line.startswith(("active_file ", "inactive_file "))]
            found.append(max(0, limit - used + sum(int(line.split()[1]) for line in cached)))
    return min(found, default=None)


def own_groups(proc: Path, cgroups: Path) -> list[Path]:
    """The folders of this process's cgroup and of its parents, whose limits apply to all of their children together."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    own = [cgroups / line[3:].strip("/") for line in lines if line.startswith("0::")]
    return [folder for group in own for folder in (group, *group.parents)]
