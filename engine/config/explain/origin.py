"""Where each value of a config was set: a file and line, or the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.config import compose, keys, tree, yaml_reader
from engine.config.named import named_by
from engine.config.overrides import check
from engine.config.own import OwnRecipe, separate
from engine.config.unnamed import names_no_family, unnamed_family
from engine.errors import Problem

COMMAND_LINE = "command line"


def origins(overrides: Sequence[str]) -> dict[str, str]:
    """Return the place of each key: {"context": "mine.yaml:7", "run.seed": "recipes/config.yaml:20", ...}.

    `overrides` are those of `load`; their values are from the command line. If `lengths` is `data` because documents
    are named, the place of lengths.name is theirs.
    """
    others, own, _ = separate(overrides)
    found = named_by(others, own)
    good = [*check(others)[0], *found.implied]
    places = _places(good, own)
    if names_no_family(good, own) and unnamed_family(compose.compose(good, own), good, own):
        places["model.family"] = places["model.experts"]
    if found.implied:
        text = str(found.documents)
        places["lengths.name"] = f"{COMMAND_LINE} ({text.partition('=')[0]})" if text in others else text
    return places


def located(problems: Sequence[Problem], good: Sequence[str], own: Sequence[OwnRecipe]) -> list[Problem]:
    """Add file and line to the problems of values that a user recipe sets. Segments of `data.mix` get their numbers.

    `good` are the overrides that are composed with `own`.
    """
    if not own or not problems:
        return [_of_segment(problem) for problem in problems]
    files, places = {str(recipe.path) for recipe in own}, _places(good, own)

    def place(problem: Problem) -> Problem:
        key = str(problem.key)
        while key not in places and key != keys.leaf_of(key):  # a value inside an item of data.mix
            key = key.rpartition(".")[0]
        found = places.get(key, "")
        if found.rpartition(":")[0] not in files:
            return _of_segment(problem)
        problem = _of_segment(problem)
        return Problem(f"{problem.key}: {problem.message}", found, problem.hint)

    return [place(problem) for problem in problems]


def _of_segment(problem: Problem) -> Problem:
    """Count the segments of `data.mix` from 1 on, as people do: data.mix.0.weights is in segment 1."""
    number, _, inner = str(problem.key).removeprefix(f"{keys.MIX}.").partition(".")
    if not number.isdecimal():
        return problem
    # An item of `lengths` is shown by its value.
    inner = "lengths: " if inner.startswith("lengths") else f"{inner}: " if inner else ""
    return Problem(f"segment {int(number) + 1}: {inner}{problem.message}", keys.MIX, problem.hint)


def _places(good: Sequence[str], own: Sequence[OwnRecipe]) -> dict[str, str]:
    """Return the place of each key that is set, as `origins` does."""
    by_option = {f"recipe/{recipe.option}": recipe for recipe in own}
    leaves, found = keys.leaves(), dict[str, str]()

    def add(name: str, lines: Mapping[str, int], section: str) -> None:
        for key, line in lines.items():
            full = f"{section}.{key}" if section else key
            if keys.leaf_of(full) in leaves:
                found[full] = f"{name}:{line}"

    for path, section in compose.layers(good, own):
        recipe = by_option.get(path)
        if recipe is not None:
            add(str(recipe.path), {"recipe": 1} | dict(recipe.lines), section)
        else:
            text = (tree.folder() / f"{path}.yaml").read_text(encoding="utf-8")
            add(f"recipes/{path}.yaml", yaml_reader.lines_of(yaml_reader.compose(text, path)), section)
    set_here = (text.removeprefix("++").partition("=")[0] for text in good)
    return found | {key: COMMAND_LINE for key in set_here if keys.leaf_of(key) in leaves and key not in tree.groups()}
