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
from engine.readers import GIB, parse_line, read_bytes

_MOST_BYTES = 2 * GIB  # some millions of steps
_MOST = 1e300  # of a value
_NUMBERS = ("tokens", "tokens_per_s", "step_s", "plan_wait_s", "data_wait_s", "max_degree", "balance", "lr")
_MAY_BE_INFINITE = ("loss", "validation_loss", "grad_norm")  # or NaN


def read_metrics(
    path: Path, say: Callable[[str], None] = lambda line: None, growing: bool = False
) -> list[dict[str, Any]]:
    """Read the metrics of all steps so far; empty if the file does not exist.

    Lines that a crash damaged or cut short are skipped, and reported to `say` in one message. With `growing`, a process
    may be writing the last line.
    """
    found, damaged = list[dict[str, Any]](), list[int]()
    *complete, rest = read_bytes(path, _MOST_BYTES).split(b"\n") if path.exists() else [b""]
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
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return None
    values = [line["step"], *(line[name] for name in _NUMBERS if line.get(name) is not None)]
    values += [line[name] for name in _MAY_BE_INFINITE if line.get(name) is not None and type(line[name]) is not float]
    return line if all(type(one) in (int, float) and -_MOST < one < _MOST for one in values) else None


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
