"""What a config may plan with, and training does not know yet: refused before anything is written, all at once."""

from __future__ import annotations

from engine.config.schema import Config
from engine.errors import Problem


def unbuilt(config: Config) -> list[Problem]:
    """Return a problem for each value that can be planned but not trained."""
    asked = (
        ("parallel.tp", config.parallel.tp, 1),
        ("parallel.pp", config.parallel.pp, 1),
        ("optimizer.on_host", config.optimizer.on_host, False),
        ("zero.weights_on_host", config.zero.weights_on_host, False),
        ("mlp_tile", config.mlp_tile, 0),
    )
    return [
        Problem(
            f"{_text(value)} can be planned but not trained yet",
            key,
            f"train with {key}={_text(only)}; `bytescale plan` takes it",
        )
        for key, value, only in asked
        if value != only
    ]


def _text(value: float) -> str:
    return str(value).lower()  # as YAML has it: true, false
