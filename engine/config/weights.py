"""The model of a config with `run.weights`: weights are a model, so it and its tokenizer are theirs, not the recipe's.

Values on the command line or in a user recipe must not contradict it, except for the rotary embedding, which training
for longer contexts changes. Packaged recipes that name weights themselves set it for their context.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from engine.config import keys, tree
from engine.config.named import sets
from engine.config.own import OwnRecipe
from engine.config.resolved import flat
from engine.config.yaml_reader import compose, lines_of
from engine.errors import Problem

MODEL = "model"
_ROPE, _ROPE_KEYS = "rope", "rope."
_TEXTS = ("family", "head_size")  # keys that may be a text, or null
_TOKENIZER = "data.tokenizer"


class Theirs(NamedTuple):
    """The model of weights, and the value of `data.tokenizer` for it."""

    model: Mapping[str, Any]  # the values of all keys below `model`, such as "layers" and "rope.factor"
    tokenizer: str | None  # None: their folder has none


# Gets run.weights and run.out. Raises DataError if there are no such weights.
ModelOf = Callable[[str, str], Theirs]


class Fitted(NamedTuple):
    """The composed values of a config with the model of its weights."""

    values: dict[str, Any]
    problems: list[Problem]
    line: str | None  # what was replaced in the recipe; None if nothing


def names_weights(layer: str) -> bool:
    """Return whether a packaged recipe names weights; `layer` is its path as `compose.layers` returns it."""
    path = tree.folder() / f"{layer}.yaml"
    if not (layer.startswith("recipe/") and path.is_file()):
        return False
    return "run.weights" in lines_of(compose(path.read_text(encoding="utf-8"), str(path)))


class Users(NamedTuple):
    """Who sets keys of `model`, if it is not a packaged recipe: an override, or a line of a file, by key."""

    options: dict[str, str]  # that set all keys: model=llama7b
    keys: dict[str, str]  # that are set explicitly


def set_by_user(good: Sequence[str], own: Sequence[OwnRecipe]) -> Users:
    """Return who sets each key of `model`, without `model.`. The command line comes before files.

    `good` are the overrides that are composed with `own`.
    """
    every = [key.removeprefix(f"{MODEL}.") for key in keys.leaves() if key.startswith(f"{MODEL}.")]
    found = Users({}, {})
    for recipe in reversed(own):
        if (line := recipe.lines.get(f"override /{MODEL}")) is not None:
            found.options.update(dict.fromkeys(every, f"{recipe.path}:{line}"))
        lines = {key: recipe.lines.get(f"{MODEL}.{key}") for key in every}
        found.keys.update({key: f"{recipe.path}:{line}" for key, line in lines.items() if line is not None})
    for text in (text.removeprefix("++") for text in good):
        if text.startswith(f"{MODEL}="):
            found.options.update(dict.fromkeys(every, text))
        found.keys.update({key: text for key in every if text.startswith(f"{MODEL}.{key}=")})
    return found


def with_weights(
    values: dict[str, Any], good: Sequence[str], own: Sequence[OwnRecipe], of_recipe: bool, found: Theirs
) -> Fitted:
    """Give composed values the model of their weights, and its tokenizer if texts are read and the user has set none.

    `of_recipe`: whether a packaged recipe names weights, so that its rotary embedding and its tokenizer are kept.
    """
    fitted = _with_model(values, good, own, of_recipe, found.model)
    data = values["data"]
    is_set = of_recipe or sets(_TOKENIZER, good, own)
    # The tokens of token files are made, perhaps by a second tokenizer in the folder of the weights.
    sources = data["sources"].values() if isinstance(data.get("sources"), dict) else ()
    formats = {one.get("format") or data.get("format") for one in sources if isinstance(one, dict)}
    of_texts = bool((formats or {data.get("format")}) - {"tokens"})
    if found.tokenizer in (None, data.get("tokenizer")) or is_set or not of_texts:
        return fitted
    line = f"{_TOKENIZER}={_text(found.tokenizer)}, that of run.weights ({_text(data.get('tokenizer'))})"
    both = f"{fitted.line}; {line}" if fitted.line else line
    return fitted._replace(values={**fitted.values, "data": {**data, "tokenizer": found.tokenizer}}, line=both)


def _with_model(
    values: dict[str, Any], good: Sequence[str], own: Sequence[OwnRecipe], of_recipe: bool, theirs: Mapping[str, Any]
) -> Fitted:
    """Give composed values the model of their weights, `theirs`."""
    ours, users = flat(values[MODEL]), set_by_user(good, own)
    # A wrong value stays, to be reported. A key of the rotary embedding is set for the context; an option such as
    # model=llama7b has one as a matter of course.
    wrong_type = {key for key in users.keys if key not in _TEXTS and isinstance(ours.get(key), str | None)}
    kept = wrong_type | ({"name"} & users.keys.keys())
    for group in (["rope_theta"], [key for key in theirs if key.startswith(_ROPE_KEYS)]):
        if of_recipe or users.keys.keys() & {*group}:
            kept |= {*group}
    differing = {key for key, value in theirs.items() if key in ours and ours[key] != value and key != "name"}
    places = users.options | users.keys
    wrong = [key for key in theirs if key in differing & places.keys() - kept and not key.startswith(_ROPE)]
    problems = []
    if wrong:
        every = [key for key in theirs if key in wrong or key in differing & users.keys.keys()]
        said = [_set(key, ours[key], places[key]) + f" (the weights have {_text(theirs[key])})" for key in every]
        hint = "remove these settings, because the model is that of the weights, or choose other weights"
        problems.append(Problem(f"contradicts {', '.join(said)}", f"run.weights={values['run']['weights']}", hint))
    if of_recipe and not differing - kept:
        kept |= {"name"}
    found: dict[str, Any] = {_ROPE: {}}
    for key, value in {**theirs, **{key: ours[key] for key in kept if key in ours}}.items():
        section = found[_ROPE] if key.startswith(_ROPE_KEYS) else found
        section[key.removeprefix(_ROPE_KEYS)] = value
    replaced = [f"{MODEL}.{key}={_text(theirs[key])} ({_text(ours[key])})" for key in theirs if key in differing - kept]
    line = None
    if replaced:
        line = f"the model is that of run.weights, in place of recipe={values['recipe']}'s: {', '.join(replaced)}"
    return Fitted({**values, MODEL: found}, problems, line)


def _set(key: str, value: Any, place: str) -> str:
    """Return what sets a key of the model, as the user wrote it or with its place."""
    text = f"{MODEL}.{key}={_text(value)}"
    return place if place.startswith(f"{MODEL}.") else f"{text} of {place}"


def _text(value: Any) -> str:
    return str(json.dumps(value))
