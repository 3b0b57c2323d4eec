"""metrics.jsonl: one JSON object a step, and the cut back to a checkpoint's step on resume."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.files import write_durably


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the steps written so far; a last line that a crash cut short is left out."""
    return read_from(path, 0)[0] if path.exists() else []


def read_from(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the whole lines after `offset` bytes, and the offset behind the last one."""
    with path.open("rb") as file:
        file.seek(offset)
        *lines, rest = file.read().split(b"\n")  # the rest is empty or cut short
        return [json.loads(line) for line in lines], file.tell() - len(rest)


def cut_back(path: Path, step: int) -> None:
    """Keep only the lines of steps up to `step`, so that a resumed run writes each step once."""
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    write_durably(path, "".join(json.dumps(line) + "\n" for line in kept).encode())


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add one step, on disk when it returns: no checkpoint is ever ahead of its metrics."""
    with path.open("a") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
