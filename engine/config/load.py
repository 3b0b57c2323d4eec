"""Turns KEY=VALUE overrides into a typed, frozen Config, or one error that lists every mistake."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import checks
from engine.config.resolved import diff, digest, read_resolved, resolved_yaml
from engine.config.schema import Config
from engine.config.tree import recipes
from engine.config.validate import right_part, validate
from engine.errors import ConfigError

__all__ = ["diff", "digest", "load", "read_resolved", "recipes", "resolved_yaml"]


def load(overrides: Sequence[str]) -> Config:
    """Load the config of a recipe with these overrides; `load([])` is the quickstart.

    Raises ConfigError with every wrong key, type and bound, and with every broken rule between keys. Rules run only if
    all keys and names are spelt correctly; otherwise they would check values that the user did not mean.
    """
    # Imported here because ranks import this module to read a resolved config, and Hydra is slow to import.
    from engine.config.compose import compose
    from engine.config.overrides import check

    good, problems = check(overrides)
    values = compose(good)
    config, invalid = validate(values)
    if not problems:
        problems = checks.check(config) if config else invalid + checks.check_part(right_part(values, invalid), invalid)
    else:
        problems += invalid
    if config is None or problems:
        raise ConfigError.of(problems)
    return config
