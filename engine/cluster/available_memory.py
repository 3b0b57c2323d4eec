"""Reads how much host memory this machine, and the container or job of this process, have in total and have left."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")  # of version 2, above the second it stalls; of 1
_USED = ("memory.current", "memory.usage_in_bytes")
# Page caches, which the system reclaims: of version 2, and of 1 with the groups below.
_CACHED = ({"active_file", "inactive_file"}, {"total_active_file", "total_inactive_file"})


def total_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the host memory in bytes, or the limit of the container or job if that is less; None if unknown.

    Unlike `available_bytes` it does not change while the machine runs.
    """
    found = []
    with suppress(OSError):
        lines = (proc / "meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemTotal:")]
    found += [limit for folder in own_groups(proc, cgroups, "memory") for limit in _numbers(folder, _LIMITS)]
    return min(found, default=None)


def available_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the bytes that can still be allocated, counting page caches as available; None if the system reports none.

    Where a container or job is throttled (`memory.high`) instead of killed, ranks would stall, so that is a limit too.
    """
    found = []
    with suppress(OSError):
        lines = (proc / "meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    for folder in own_groups(proc, cgroups, "memory"):
        limit, used = min(_numbers(folder, _LIMITS), default=None), _numbers(folder, _USED)
        with suppress(OSError, ValueError):
            values = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = next((names for names in reversed(_CACHED) if names <= values.keys()), set())
            if limit is not None and used:
                found.append(max(0, limit - used[0] + sum(int(values[name]) for name in cached)))
    return min(found, default=None)


def _numbers(folder: Path, names: Sequence[str]) -> list[int]:
    """Read files with a number each; without those that are missing, or have the word for no limit."""
    found = list[int]()
    for name in names:
        with suppress(OSError, ValueError):
            found.append(int((folder / name).read_text()))
    return found


def own_groups(proc: Path, cgroups: Path, controller: str) -> list[Path]:
    """The folders of this process's cgroups and of their parents, whose limits apply to all of their children together.

    With version 1, those of a `controller` such as `memory`. In a container they may be the top of what is mounted,
    though /proc names a folder below it.
    """
    try:
        lines = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except OSError:
        return []
    tops = {"": cgroups, controller: cgroups / controller}
    own = [(tops[name], path) for _, names, path in lines for name in names.split(",") if name in tops]
    groups = [(top, top / path.strip("/")) for top, path in own]
    return [folder for top, group in groups for folder in (group, *group.parents) if folder.is_relative_to(top)]
