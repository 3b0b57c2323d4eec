"""metrics.jsonl: one JSON object a step, and the cut back to a checkpoint's step on resume."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.files import write_durably


def read_metrics(path: Path, say: Callable[[str], None] = lambda line: None) -> list[dict[str, Any]]:
    """Return the steps written so far; lines that a crash damaged or cut short are said and left out."""
    found = []
    *whole, rest = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, text in enumerate([*whole, rest] if rest else whole, start=1):
        line = _parsed(text)
        if line is None:
            say(f"{path}:{number}: this line is damaged and left out; the report lacks the step that it told of")
        else:
            found.append(line)
    return found


def read_from(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the whole lines after `offset` bytes, and the offset behind the last one."""
    with path.open("rb") as file:
        file.seek(offset)
        *lines, rest = file.read().split(b"\n")  # the rest is empty or not whole yet
        return [line for line in map(_parsed, lines) if line is not None], file.tell() - len(rest)


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Return a line's object, or None if it is not one of a step: after a power loss it may be anything."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def cut_back(path: Path, step: int, say: Callable[[str], None] = lambda line: None) -> None:
    """Keep only the whole lines of steps up to `step`, so that a resumed run writes each step once."""
    kept = [line for line in read_metrics(path, say) if line["step"] <= step]
    write_durably(path, "".join(json.dumps(line) + "\n" for line in kept).encode())


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add one step, on disk when it returns: no checkpoint is ever ahead of its metrics."""
    with path.open("a") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
