"""User recipes: YAML files outside the package that `recipe=./mine.yaml` or `--config mine.yaml` names.

Such a file is composed like a packaged recipe. It is read and checked here, before Hydra sees it, because Hydra's
errors stop at the first mistake and name no line. A key that is wrong is reported and left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine import readers
from engine.config import keys, tree, yaml_reader
from engine.config.explain.spelling import did_you_mean
from engine.config.overrides import key_problem, option_problem
from engine.config.resolved import FORMAT, upgraded
from engine.config.schema import Config
from engine.config.validate import NOT_SET
from engine.config.versions import CHANGES
from engine.errors import ConfigError, Problem

_COPY = "`bytescale recipes copy NAME FILE` copies a packaged recipe to a file"
_NAMED = 3  # keys in a message


@dataclass(frozen=True)
class OwnRecipe:
    """One file: what Hydra composes, and the line of each key for messages."""

    option: str  # its name in Hydra's group `recipe`
    path: Path  # as the user wrote it, for messages
    values: dict[str, Any]  # keys that exist, and `defaults` in Hydra's form
    lines: Mapping[str, int]  # by dotted key, and by entry of `defaults` that chooses an option: `override /data`
    texts: Mapping[str, str]  # values as the user wrote them, by dotted key


def separate(overrides: Sequence[str]) -> tuple[list[str], list[OwnRecipe], list[Problem]]:
    """Take `recipe=PATH` out of the overrides.

    Returns the other overrides, the file and the files that it builds on (none if no path is given), and the problems
    of these files. Of several values of `recipe` the last one counts.
    """
    others: list[str] = []
    path: str | None = None
    for text in overrides:
        key, _, value = text.partition("=")
        is_own = key == "recipe" and tree.is_path(value.strip("'\""))
        if key == "recipe":
            path = value.strip("'\"") if is_own else None
        if not is_own:
            others.append(text)
    return others, *(([], []) if path is None else read(Path(path).expanduser()))


def read(path: Path) -> tuple[list[OwnRecipe], list[Problem]]:
    """Read a user recipe and the files it builds on, each through the `defaults` of the previous one.

    `values` contains only keys of the schema. The list is empty if a file cannot be read, or if its `defaults` are
    wrong: then its keys would be checked together with values that the user did not mean. Problems name file and line.
    """
    chain: list[OwnRecipe] = []
    problems: list[Problem] = []
    place, seen, whole = "recipe", set[str](), True
    next_path: Path | None = path
    while next_path is not None:
        path = next_path
        real = os.path.realpath(path)
        if real in seen:
            problems.append(Problem(f"{path} includes itself", place, "remove it from `defaults`"))
            return [], problems
        seen.add(real)
        try:
            text = read_text(path, place)
            values, node = parse(text, path)
            lines, texts = yaml_reader.lines_of(node), yaml_reader.texts_of(node)
            values = _of_this_version(values, f"{path}:{lines.get(FORMAT, 1)}")
        except ConfigError as error:
            return [], [*problems, *error.problems]
        if values.get("recipe") in tree.recipes() and not {"defaults", "model"} & values.keys():
            # Otherwise it would be the name only, and the quickstart's tiny model would be trained.
            hint = f"write `defaults:` and below it `- {values['recipe']}`"
            problems.append(Problem("recipe: does not choose a recipe", f"{path}:{lines['recipe']}", hint))
            whole = False
        next_option = f"own-{len(chain) + 1}"
        entries, base, wrong = _defaults(values.pop("defaults", None) or [], path, lines, next_option)
        whole = whole and not wrong
        problems += wrong
        known = dict(_known(values, path, lines, problems))
        # Without a separate name, a file would get the name, and the run folder, of its base recipe.
        named = {"recipe": path.stem} | known | ({"defaults": entries} if entries else {})
        chain.append(OwnRecipe(f"own-{len(chain)}", path, named, lines, texts))
        next_path, place = base or (None, place)
    return (chain if whole else []), problems


def without_base(own: Sequence[OwnRecipe], problems: Sequence[Problem]) -> list[Problem]:
    """Make one problem of all keys that are not set because the last file of `own` builds on no recipe.

    Keys of groups are unchanged: an option such as data=jsonl has keys that every user must set.
    """
    missing = [
        one.key
        for one in problems
        if one.message == NOT_SET and one.key and one.key.partition(".")[0] not in tree.groups()
    ]
    entries = own[-1].values.get("defaults", ()) if own else ()
    if not own or not missing or any(isinstance(entry, str) and entry != "_self_" for entry in entries):
        return list(problems)
    some = ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")
    message = f"has no base recipe and does not set {some}"
    hint = "add `defaults: quickstart` or another recipe (`bytescale recipes list`), whose values are used for the rest"
    rest = [one for one in problems if one.key not in missing]
    return [Problem(message, f"{own[-1].path}:1", hint), *rest]


def read_text(path: Path, place: str) -> str:
    """Read a recipe's file. Raises ConfigError that names `place`: the line or the key that names the file."""
    try:
        return readers.read_text(path, yaml_reader.MOST_BYTES, ConfigError, "name a YAML file")
    except FileNotFoundError:
        hint = did_you_mean(path.stem, tree.recipes(), _COPY)
        raise ConfigError(f"no such file: {path}", key=place, hint=hint) from None


def parse(text: str, path: Path) -> tuple[dict[str, Any], yaml.Node | None]:
    """Parse the YAML of a recipe as Hydra does; also return its root, for lines and texts.

    Raises ConfigError with `file:line` if it is not KEY: VALUE.
    """
    node = yaml_reader.compose(text, str(path))
    try:
        with yaml_reader.refusing(node, str(path)):
            # OmegaConf reads 1e-4 as a number, as in packaged recipes; PyYAML alone reads it as text.
            values = yaml_reader.checked(OmegaConf.to_container(OmegaConf.create(text), resolve=False))
    except OmegaConfBaseException as error:
        message = f"is not valid YAML: {str(error).splitlines()[0]}"
        raise ConfigError(message, key=str(path), hint="write KEY: VALUE") from error
    # OmegaConf turns a file of one word into {word: None}
    if node is not None and not isinstance(node, yaml.MappingNode):
        raise ConfigError("is not a recipe", key=f"{path}:1", hint=f"write KEY: VALUE on each line; {_COPY}")
    return {str(key): value for key, value in values.items()}, node


def _of_this_version(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the values of a file without the number of its format; a saved config gets the keys added since.

    Any other recipe has these from its base. Raises ConfigError as `upgraded`.
    """
    new = upgraded(values, place)
    since = {key.partition(".")[0] for change in CHANGES.values() for key in change.added}
    is_saved = "defaults" not in values and Config.model_fields.keys() - since <= values.keys()
    return new if is_saved else {key: value for key, value in values.items() if key != FORMAT}


def _known(
    values: Mapping[Any, Any], path: Path, lines: Mapping[str, int], problems: list[Problem], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the keys that exist with their values, sections as dicts; append a problem for each other key."""
    leaves, sections = keys.leaves(), keys.sections()
    for name, value in values.items():
        key = f"{prefix}{name}"
        dotted = "." in str(name)  # to YAML `a.b: 1` is one key
        # Hydra merges neither a list with a mapping nor the other way round: it fails, and does not say where.
        if key == keys.MIX and isinstance(value, Mapping):
            yield str(name), [{"weights": value}]
        elif (keys.is_list(key) and isinstance(value, Mapping)) or (key == keys.SOURCES and isinstance(value, list)):
            message = f"{key}: must {'be a list' if keys.is_list(key) else 'have keys'}, not {value}"
            problems.append(Problem(message, f"{path}:{lines.get(key, 1)}", f"for example {keys.example(key)}"))
        elif key in leaves and not dotted:
            is_home = key in keys.PATHS and isinstance(value, str) and value.startswith("~")
            yield str(name), str(Path(value).expanduser()) if is_home else value
        elif key in sections and isinstance(value, Mapping) and not dotted:
            yield str(name), dict(_known(value, path, lines, problems, f"{key}."))
        else:
            message, hint = _wrong_key(key, value)
            problems.append(Problem(f"{key}: {message}", f"{path}:{lines.get(key, 1)}", hint))


def _wrong_key(key: str, value: object) -> tuple[str, str | None]:
    """Explain why a key of a file is not one of the schema: message and hint."""
    groups = tree.groups()
    if key in keys.leaves():
        *sections, last = key.split(".")
        hint = "write " + " and below it ".join([*(f"`{section}:`" for section in sections), f"`{last}: {value}`"])
        return "is written with dots", hint
    if key in groups and not isinstance(value, Mapping):
        option = groups[key][0] if value is None else value
        return "is a group", f"choose one of its options in `defaults`: - override /{key}: {option}"
    if key in keys.sections():
        return "is a section and has no value", "write its keys below it, indented, or remove it"
    found = key_problem(key, value)
    return (found.message, found.hint) if found else ("unknown key", None)


def _defaults(
    entries: object, path: Path, lines: dict[str, int], next_option: str
) -> tuple[list[Any], tuple[Path, str] | None, list[Problem]]:
    """Check the `defaults` of a file. Returns them in Hydra's form, the own file to build on, and the problems.

    The own file comes with the place that names it. `lines` gets the line of each option.

    There may be one recipe to build on (`- llama3-8b-2m`, `- base/llama3-8b`, or a file `- ./base.yaml`, relative to
    this file, for which Hydra gets `next_option`), `_self_`, and one option for each group (`- override /model: tiny`).
    An invalid entry is left out.
    """
    packaged = [*tree.recipes(), *tree.bases()]
    recipes: list[Any] = []
    options: dict[str, Any] = {}
    base: tuple[Path, str] | None = None
    problems: list[Problem] = []
    if not isinstance(entries, list):
        entries = [entries]
    for number, entry in enumerate(entries):
        place = f"{path}:{lines.get(f'defaults.{number}', lines.get('defaults', 1))}"
        found: Problem | None = None
        # An entry with a key is the option of a group. Any other is `_self_`, or the one recipe on which the file
        # builds.
        if isinstance(entry, Mapping) and len(entry) == 1:
            ((key, option),) = entry.items()
            group = str(key).removeprefix("override ").strip().removeprefix("/")
            found = _group_problem(str(key), group, option, twice=f"override /{group}" in options)
            if found is None:
                options[str(key)] = option
                lines[str(key)] = int(place.rpartition(":")[2])
        elif entry == "_self_":
            recipes.append(entry)
        elif not isinstance(entry, str):
            found = Problem("is not an entry of `defaults`", None, "for example - override /model: tiny")
        elif base is not None or any(one in packaged for one in recipes):
            found = Problem(f"{entry}: builds on a second recipe", None, "name one recipe only")
        elif entry in packaged:
            recipes.append(entry)
        elif entry.startswith((".", "/", "~")) or entry.lower().endswith((".yaml", ".yml")):
            recipes.append(next_option)
            base = path.parent / Path(entry).expanduser(), place
        else:
            hint = did_you_mean(entry, packaged, "`bytescale recipes list` lists all recipes")
            found = Problem(f"unknown recipe: {entry}", None, hint)
        if found is not None:
            problems.append(Problem(f"defaults: {found.message}", place, found.hint))
    return [*recipes, *({key: option} for key, option in options.items())], base, problems


def _group_problem(key: str, group: str, option: object, *, twice: bool) -> Problem | None:
    """Check an entry `override /GROUP: OPTION` of `defaults`; `twice` if the group already has an option."""
    groups = [name for name in tree.groups() if name != "recipe"]
    if group == "recipe":
        return Problem("a recipe is named without its group", None, f"write - {option}")
    if group not in groups:
        return Problem(f"unknown group: {group}", None, did_you_mean(group, groups, f"groups: {', '.join(groups)}"))
    if key != f"override /{group}":
        return Problem(f"cannot be read: {key}: {option}", None, f"write - override /{group}: {option}")
    if twice:
        return Problem(f"{group} is chosen twice", None, "keep one of them")
    found = option_problem(group, option)
    return found and Problem(f"{group}: {found.message}", None, found.hint)
