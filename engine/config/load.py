"""The door: from KEY=VALUE overrides to one typed, frozen Config, or to one error with every mistake."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import checks
from engine.config.resolved import diff, digest, read_resolved, resolved_yaml
from engine.config.schema import Config
from engine.config.tree import recipes
from engine.config.validate import right_part, validate
from engine.errors import ConfigError

__all__ = ["diff", "digest", "load", "read_resolved", "recipes", "resolved_yaml"]


def load(overrides: Sequence[str], refuses: bool = True) -> Config:
    """Return the recipe that the overrides choose and change; `load([])` is the quickstart.

    Raises ConfigError with every bad key, type and bound, and every rule that right values break. Behind a mistyped
    key or name no rule is judged: it would speak of values that the user did not mean. A context that the ranks do not
    hold is let through for whoever only wants to know what they do (`refuses`).
    """
    # Ranks import this file too, and they read a resolved text: they never pay for Hydra.
    from engine.config.compose import compose
    from engine.config.overrides import check

    good, problems = check(overrides)
    values = compose(good)
    config, invalid = validate(values)
    if not problems:
        problems = checks.check(config, refuses) if config else invalid + checks.check_part(right_part(values, invalid))
    else:
        problems += invalid
    if config is None or problems:
        raise ConfigError.of(problems)
    return config
