"""Defaults with which commands can be tried out, and which everybody replaces by their own."""

from __future__ import annotations

from typing import Literal

from engine.config.schema import Config
from engine.config.sources import BUILT_IN

Part = Literal["model", "documents", "lengths", "rates"]
_WAYS: dict[Part, str] = {
    "model": "model=tiny (recipe=NAME; `bytescale recipes list`)",
    "documents": "documents of Python's standard library (data.path=FILE)",
    "lengths": "lengths of Python's standard library (data.path=FILE, or lengths=github)",
    "rates": "nominal hardware rates (`bytescale profile-hardware`)",
}


def toys(config: Config, *parts: Part) -> str | None:
    """Return a line with those of `parts` that are defaults, and how to set one's own; None if there are none.

    `lengths` are those that are planned, `rates` those by which times are modelled.
    """
    stdlib = not config.data.sources and config.data.path in BUILT_IN
    is_toy: dict[Part, bool] = {
        "model": config.model.name == "tiny",
        "documents": stdlib,
        "lengths": stdlib and config.lengths.name == "data",
        "rates": config.cluster.calibration is None,
    }
    found = [_WAYS[part] for part in parts if is_toy[part]]
    return f"placeholder defaults: {', '.join(found)}" if found else None
