"""Reads how much host memory this process can still allocate, in its machine and in its container or job."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def available_bytes(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Return the bytes that can still be allocated, counting page caches as available; None if the system reports none.

    Limits of cgroup v1 are not read.
    """
    found = []
    with suppress(OSError):
        lines = (proc / "meminfo").read_text().splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text().splitlines()
        for group in [cgroups / line[3:].strip("/") for line in lines if line.startswith("0::")]:
            # A parent's limit applies to all of its children together.
            for folder in (group, *group.parents):
                with suppress(OSError, ValueError):  # the root group has no such files, and "max" means no limit
                    limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
                    lines = (folder / "memory.stat").read_text().splitlines()
                    cached = [line for line in lines if line.startswith(("active_file ", "inactive_file "))]
                    found.append(max(0, limit - used + sum(int(line.split()[1]) for line in cached)))
    return min(found, default=None)
