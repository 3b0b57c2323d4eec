"""What changed between the formats of saved configs: resolved.yaml of a run folder, and the values in its checkpoints.

A key that is added to the schema gets a row in `CHANGES`, with the value that runs without it had. So these runs can be
read and resumed. A key that is removed gets a row with what replaced it. The rows belong to the format of the next
release; a release keeps a run folder of its format in tests/runs/, and the next change begins a new format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from engine.family.families import unnamed
from engine.format_number import FIRST

Older = Mapping[str, Any]  # the values of a saved config by dotted key, those that were added since then included


@dataclass(frozen=True)
class Change:
    """What a format changed in the keys of the one before."""

    # The value that runs without a key had, or a function of their other values. `must_match` has only some keys: for a
    # key that is one of them, the function must get along with these.
    added: Mapping[str, Any | Callable[[Older], Any]] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)  # by key, what a user writes instead


CHANGES: dict[int, Change] = {  # ascending
    2: Change(
        added={
            "data.separator": None,
            "data.transform": [],
            "cluster.headroom": 0.0,
            "model.family": lambda old: unnamed(old["model.experts"]),
            "model.window": None,
            "model.windowed": [True],
            "model.head_size": None,
            "model.norm_top_k": True,
            "data.ray.address": None,
            "data.ray.loaders": None,
            "data.ray.standbys": 1,
            "data.ray.deadline": 5.0,
            "data.ray.memory": 4 << 30,
            "linear_dtype": "same",
        }
    ),
}


def newest() -> int:
    """The format in which configs are saved."""
    return max(CHANGES)


def added(values: Older, written: int = FIRST) -> dict[str, Any]:
    """Return the keys that were added since format `written` with the values that a saved config stands for.

    `values` are those of the config. A key that it has is left out, and so is one whose function fails on values that
    are missing or wrong.
    """
    found = dict(values)
    for change in _since(written):
        for key, value in change.added.items():
            with suppress(LookupError, TypeError, ValueError):
                found.setdefault(key, value(found) if callable(value) else value)
    return {key: value for key, value in found.items() if key not in values}


def gone(written: int = FIRST) -> set[str]:
    """Return the keys that configs of format `written` may have and that are gone since."""
    return {key for change in _since(written) for key in change.gone}


def segment(written: Any) -> Any:
    """Return a segment of `data.mix` as this version writes it: the first format had `linear: true` or false."""
    if not isinstance(written, Mapping) or not isinstance(written.get("linear"), bool) or "schedule" in written:
        return written
    others = {key: value for key, value in written.items() if key != "linear"}
    return {**others, "schedule": "linear"} if written["linear"] else others


def _since(written: int) -> list[Change]:
    return [change for number, change in CHANGES.items() if number > written]


def replacement(key: str) -> str | None:
    """What a user writes instead of a key that is gone; None for any other key."""
    return next((change.gone[key] for change in CHANGES.values() if key in change.gone), None)
