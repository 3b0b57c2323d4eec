"""metrics.jsonl: one JSON object per step. Resuming cuts the file back to the checkpoint's step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine import files
from engine.config.units import counted
from engine.files import write_durably
from engine.readers import HUGE, parse_line, read_bytes


def read_metrics(
    path: Path, say: Callable[[str], None] = lambda line: None, growing: bool = False
) -> list[dict[str, Any]]:
    """Read the metrics of all steps so far; empty if the file does not exist.

    Lines that a crash damaged or cut short are skipped, and reported to `say` in one message. With `growing`, a process
    may be writing the last line.
    """
    found, damaged = list[dict[str, Any]](), list[int]()
    *complete, rest = read_bytes(path, HUGE).split(b"\n") if path.exists() else [b""]
    for number, text in enumerate([*complete, rest] if rest else complete, start=1):
        line = _parse(text)
        if line is not None:
            found.append(line)
        elif not growing or number <= len(complete):
            damaged.append(number)
    if damaged:
        more = f"; so {'is' if len(damaged) == 2 else 'are'} {counted(len(damaged) - 1, 'line')} after it"
        missing = "this line is damaged and was skipped: its step is missing from reports"
        say(f"{path}:{damaged[0]}: {missing}{more if len(damaged) > 1 else ''}")
    return found


def validation_losses(path: Path) -> dict[int, float]:
    """Read the validation losses so far, by step."""
    return {line["step"]: line["validation_loss"] for line in read_metrics(path) if "validation_loss" in line}


def read_from(
    path: Path, offset: int, say: Callable[[str], None] = lambda line: None
) -> tuple[list[dict[str, Any]], int]:
    """Read the complete lines after byte `offset`; return them, and the offset after the last of them.

    Damaged lines are skipped, and reported to `say` in one message.
    """
    with path.open("rb") as file:
        file.seek(offset)
        *lines, rest = file.read().split(b"\n")  # the rest is empty, or a line that is still being written
        found = [_parse(line) for line in lines]
        if damaged := found.count(None):
            say(f"{path}: {counted(damaged, 'line')} after byte {offset:,} are damaged and skipped")
        return [line for line in found if line is not None], file.tell() - len(rest)


def _parse(text: bytes) -> dict[str, Any] | None:
    """Parse a line; None if it does not describe a step, because after a power loss a line may contain anything."""
    try:
        line = parse_line(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def cut_back(path: Path, step: int, say: Callable[[str], None] = lambda line: None) -> None:
    """Keep only the steps up to `step`, so that a resumed run writes each step once. Creates a missing file."""
    kept = [line for line in read_metrics(path, say) if line["step"] <= step]
    write_durably(path, "".join(json.dumps(line) + "\n" for line in kept).encode())


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add one step and sync it, so that no checkpoint is newer than the metrics."""
    with files.append(path) as file:
        file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
