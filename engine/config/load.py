"""Turns KEY=VALUE overrides into a typed, frozen Config, or one error that lists every mistake."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.config import checks
from engine.config.resolved import diff, digest, read_resolved, resolved_yaml
from engine.config.schema import Config
from engine.config.tree import recipes
from engine.config.validate import right_part, validate
from engine.errors import ConfigError

__all__ = ["diff", "digest", "load", "read_resolved", "recipes", "resolved_yaml"]


def load(overrides: Sequence[str], say: Callable[[str], None] = lambda line: None, *, rules: bool = True) -> Config:
    """Load the config of a recipe with these overrides; `load([])` is the quickstart.

    The recipe is packaged (`recipe=NAME`) or a YAML file (`recipe=PATH`). If documents are named, on the command line
    or in such a file, `lengths` is `data`; if lengths are named too, these are used, and `say` gets a line about it
    (named.py). Raises ConfigError with every wrong key, type and bound, and with every broken rule between keys; what a
    file sets is named by file and line. Rules run only if all keys and names are spelt correctly; otherwise they would
    check values that the user did not mean. Without `rules` they do not run at all.
    """
    # Imported here because ranks import this module to read a resolved config, and Hydra is slow to import.
    from engine.config.compose import compose
    from engine.config.named import named_by
    from engine.config.origin import located
    from engine.config.overrides import check
    from engine.config.own import separate, without_base

    others, own, problems = separate(overrides)
    good, wrong = check(others)
    chosen = named_by(others, own)
    good += chosen.implied
    problems += wrong
    try:
        values = compose(good, own)
    except ConfigError as error:
        raise ConfigError.of([*problems, *located(error.problems, good, own)]) from error
    typed = {key: text for recipe in reversed(own) for key, text in recipe.texts.items()}
    config, invalid = validate(values, typed | dict(text.split("=", 1) for text in good))
    if not problems and not (config and not rules):
        found = checks.check(config) if config else invalid + checks.check_part(right_part(values, invalid), invalid)
    else:
        found = invalid
    problems += located(without_base(own, found), good, own)
    if config is None or problems:
        raise ConfigError.of(problems)
    if chosen.conflict and config.lengths.name != "data":
        say(chosen.conflict)
    return config
