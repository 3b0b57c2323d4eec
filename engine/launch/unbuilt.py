"""What a config may plan with, and training does not know yet: refused before anything is written, all at once."""

from __future__ import annotations

from engine.config.schema import Config
from engine.errors import Problem


def unbuilt(config: Config) -> list[Problem]:
    """Return a problem for each value that can be planned but not trained."""
    asked = (
        ("parallel.tp", config.parallel.tp, 1),
        ("parallel.pp", config.parallel.pp, 1),
    )
    return [
        Problem(
            f"{value} can be planned but not trained yet",
            key,
            f"train with {key}={only}; `bytescale plan` takes it",
        )
        for key, value, only in asked
        if value != only
    ]
