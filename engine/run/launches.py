"""launches.jsonl: when the ranks of a run were started, where and with what, and how they ended. Imports no torch.

A start adds a line, and its end another one: {"ended": seconds, "outcome": text}. A launcher that is killed adds no
end. A line that cannot be written is left out: this record is for people, and must not stop a run.
"""

from __future__ import annotations

import json
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engine.files import append
from engine.readers import LARGE, parse_line, read_bytes

STOPPED = "stopped on request"  # the outcome of a start that was asked to stop
_PACKAGES = ("bytescale", "torch", "deepspeed", "flash-attn", "numpy")


@dataclass(frozen=True)
class LaunchRecord:
    """One start of the ranks. Times are in seconds since 1970."""

    began: float
    step: int  # the first that it was to run
    ranks: int
    hosts: Sequence[str]
    command: str
    system: str
    versions: Mapping[str, str]
    ended: float | None = None  # None: it runs, or its launcher was killed
    outcome: str = ""  # why it ended before the last step


def begin(path: Path, step: int, ranks: int, hosts: Sequence[str]) -> None:
    """Add a start of `ranks` ranks on `hosts`, whose first step is `step`."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    line = {
        "began": time.time(),
        "step": step,
        "ranks": ranks,
        "hosts": list(hosts),
        "command": shlex.join(["bytescale", *sys.argv[1:]]),
        "system": platform.platform(),
        "versions": versions,
    }
    _append(path, line)


def end(path: Path, outcome: str = "") -> None:
    """Add the end of the last start, and why it ended if that was before the last step."""
    _append(path, {"ended": time.time(), "outcome": outcome})


def _append(path: Path, line: Mapping[str, object]) -> None:
    with suppress(OSError), append(path) as file:
        file.write(json.dumps(line).encode() + b"\n")


def read_launches(path: Path) -> list[LaunchRecord]:
    """Read all starts so far; empty without the file. Damaged lines and those of other versions are skipped."""
    found = list[LaunchRecord]()
    for text in read_bytes(path, LARGE).splitlines() if path.exists() else ():
        try:
            line = parse_line(text)
            if "began" in line:
                found.append(LaunchRecord(**line))
            elif found and found[-1].ended is None:
                found[-1] = LaunchRecord(**{**vars(found[-1]), **line})
        except (ValueError, TypeError):
            continue
    return found
