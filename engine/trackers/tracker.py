"""What every tracker is: it writes the metrics of the steps of one run for another program. Imports no such program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

Value = str | int | float | bool


class Step(NamedTuple):
    """The metrics of a step, by name, such as "loss" or "validation_losses/web"."""

    number: int
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Tracked:
    """The run that a tracker writes down. `id` is None if the tracker has not seen this run before."""

    name: str
    folder: Path  # where the tracker may write
    config: Mapping[str, Value]  # by dotted key
    id: str | None


class Tracker(Protocol):
    """Writes down one run. Any method may raise any error, or take any time."""

    id: str  # with which the run is continued when it is resumed

    def log(self, steps: Sequence[Step]) -> None:
        """Write steps, in their order; what the tracker keeps on disk is there when this returns."""

    def close(self) -> None:
        """Finish writing."""


def metrics_of(line: Mapping[str, Any]) -> Step:
    """Return the numbers in a line of metrics.jsonl. Nested ones get a path as their name."""

    def numbers(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
        found = dict[str, float]()
        for name, value in values.items():
            if isinstance(value, Mapping):
                found |= numbers(value, f"{prefix}{name}/")
            elif isinstance(value, (int, float)) and not isinstance(value, bool):
                found[f"{prefix}{name}"] = value
        return found

    return Step(line["step"], numbers({name: value for name, value in line.items() if name != "step"}, ""))
