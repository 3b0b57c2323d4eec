"""Turns KEY=VALUE overrides into a typed, frozen Config, or one error that lists every problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import checks, keys
from engine.config.resolved import diff, digest, read_resolved, resolved_yaml
from engine.config.schema import Config
from engine.config.secret import has_secret
from engine.config.tree import recipes
from engine.config.validate import NOT_SET, right_part, validate
from engine.errors import ConfigError, DataError

if TYPE_CHECKING:
    from engine.config.own import OwnRecipe
    from engine.config.weights import Fitted, ModelOf

__all__ = ["diff", "digest", "load", "read_resolved", "recipes", "resolved_yaml"]


def load(
    overrides: Sequence[str],
    say: Callable[[str], None] = lambda line: None,
    *,
    rules: bool = True,
    model_of: ModelOf | None = None,
    say_model: Callable[[str], None] = lambda line: None,
    elsewhere: bool = False,
) -> Config:
    """Load the config of a recipe with these overrides; `load([])` is the quickstart.

    The recipe is packaged (`recipe=NAME`) or a YAML file (`recipe=PATH`). If documents are named, on the command line
    or in such a file, `lengths` is `data`; if lengths are named too, these are used, and `say` gets a line about it
    (named.py). Raises ConfigError with every wrong key, type and bound, and with every broken rule between keys; what a
    file sets is named by file and line. Rules run only if all keys and names are spelt correctly; otherwise they would
    check values that the user did not mean. Without `rules` they do not run at all.

    With `model_of` the model of a config with `run.weights` is that of the weights; `say_model` gets a line about what
    this replaces (weights.py). Raises DataError if there are no such weights, unless a recipe names weights, or the run
    will be `elsewhere`, on machines that have them: then the model is the recipe's.
    """
    # Imported here because ranks import this module to read a resolved config, and Hydra is slow to import.
    from engine.config.compose import compose
    from engine.config.explain.origin import located
    from engine.config.named import named_by
    from engine.config.overrides import check
    from engine.config.own import separate, without_base
    from engine.config.unnamed import unnamed_family

    # Problems are collected, not raised, so that one error lists all of them.
    others, own, problems = separate(overrides)
    good, wrong = check(others)
    chosen = named_by(others, own)
    good += chosen.implied
    problems += wrong
    try:
        values = compose(good, own)
    except ConfigError as error:
        raise ConfigError.of([*problems, *located(error.problems, good, own)]) from error
    if family := unnamed_family(values, good, own):
        values = {**values, "model": {**values["model"], "family": family}}
    weights = values["run"].get("weights")
    # Of a URL with a secret nothing is read, and no message shows it: a rule refuses it.
    if model_of is not None and isinstance(weights, str) and not has_secret(weights):
        fitted = _with_weights(values, good, own, model_of, wrong=bool(problems), elsewhere=elsewhere)
        values, problems = fitted.values, [*problems, *fitted.problems]
        if fitted.line and not problems:
            say_model(fitted.line)
    # What the user typed, for messages: 2M instead of 2097152. The command line comes last because it overrides files.
    typed = {key: text for recipe in reversed(own) for key, text in recipe.texts.items()}
    config, invalid = validate(values, typed | dict(text.split("=", 1) for text in good))
    if not problems and not (config and not rules):
        found = checks.check(config) if config else invalid + checks.check_part(right_part(values, invalid), invalid)
    else:
        found = invalid
    if any(str(problem.key).startswith(f"{keys.SOURCES}.") for problem in problems):
        # A source that is refused stands in place of data.path.
        found = [one for one in found if (one.key, one.message) != ("data.path", NOT_SET)]
    problems += located(without_base(own, found), good, own)
    if config is None or problems:
        raise ConfigError.of(problems)
    if chosen.conflict and config.lengths.name != "data":
        say(chosen.conflict)
    return config


def _with_weights(
    values: dict[str, Any],
    good: Sequence[str],
    own: Sequence[OwnRecipe],
    model_of: ModelOf,
    *,
    wrong: bool,
    elsewhere: bool,
) -> Fitted:
    """Give composed values the model of `run.weights`.

    A recipe that names weights has their model, so they may be missing where it is only planned. If other settings are
    `wrong`, missing weights are no error. Raises DataError as `load` does.
    """
    from engine.config.compose import layers
    from engine.config.weights import Fitted, names_weights, with_weights

    weights = values["run"]["weights"]
    of_recipe = any(names_weights(path) for path, _ in layers(good, own))
    try:
        theirs = model_of(weights, str(values["run"]["out"]))
    except DataError:
        of_file = any("run.weights" in one.lines for one in own)  # such as a copy of a packaged recipe
        if wrong or ((of_recipe or of_file or elsewhere) and not Path(weights).exists()):
            named = any(text.startswith("run.weights=") for text in good)
            line = f"run.weights={weights} does not exist here, so the model is that of recipe={values['recipe']}"
            return Fitted(values, [], line if named else None)
        raise
    return with_weights(values, good, own, of_recipe, theirs)
