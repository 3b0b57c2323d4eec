"""`bytescale recipes`: lists recipes, prints their files, and copies one to a file of the user's own."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, new_recipe, write_recipe
from engine.config.explain.spelling import did_you_mean
from engine.errors import ConfigError

_WIDTH = 80  # columns of a list that is not written to a terminal

app = typer.Typer(help="List recipes, show one, or copy one.")

Recipe = Annotated[str, typer.Argument(metavar="NAME|FILE", help="A packaged recipe, or a YAML file.")]


@app.command("list")
def list_(
    folder: Annotated[
        str | None, typer.Argument(metavar="[FOLDER]", help="List the YAML files in this folder instead.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the packaged recipes, or the recipes in a folder."""
    from engine.config import tree

    if folder is None:
        texts = {name: tree.text_of("recipe", name) for name in tree.recipes()}
    elif Path(folder).is_dir():
        files = sorted(file for file in Path(folder).iterdir() if tree.is_path(file.name) and file.is_file())
        texts = {str(file): file.read_text(encoding="utf-8", errors="replace") for file in files}
    else:
        raise ConfigError("no such folder", key=folder, hint="`bytescale recipes list` lists the packaged recipes")
    found = [{"name": name, "about": tree.about(text)} for name, text in texts.items()]
    longest, parts = max((len(name) for name in texts), default=0), []
    for status, ours in _by_status({one["name"]: one["about"] for one in found}).items():
        # Padded names, so that the second columns of all tables are below each other.
        rows = [[name.ljust(longest), what] for name, what in ours]
        heading = f"{output.title(status)}\n" if status else ""
        parts.append(heading + output.table(["recipe", "description"], rows, width=_WIDTH))
    text = "\n\n".join(parts) or f"no recipes in {folder}"
    output.emit({"recipes": found}, text, as_json=json)


@app.command()
def show(name: Recipe, json: Json = False, debug: Debug = False) -> None:
    """Print a recipe's file. `bytescale config show recipe=NAME` prints every resolved value."""
    from engine.config import own, tree

    if tree.is_path(name):
        text = own.read_text(Path(name).expanduser(), "recipe")
    else:
        _check_name(name)
        text = tree.text_of("recipe", name)
    output.emit({"recipe": {"name": name, "about": tree.about(text), "text": text}}, text, as_json=json)


@app.command()
def copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A packaged recipe.")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file to write, for example mine.yaml.")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a packaged recipe to a new file. Edit it, and run it with --config FILE."""
    from engine.config.own_text import own_copy

    _check_name(name)
    path = new_recipe(file, "FILE")
    text = own_copy(name, path)
    write_recipe(path, text, "FILE")
    flag = f"--config {shlex.quote(str(path))}"
    said = f"{path}: edit it, then `bytescale estimate-memory {flag}` and `bytescale train {flag}`"
    output.emit({"recipe": {"name": name, "file": str(path), "text": text}}, said, as_json=json)


def _by_status(abouts: Mapping[str, str]) -> dict[str, list[tuple[str, str]]]:
    """Group descriptions by name, {name: text}, by their second sentence, if several have it: {status: [(name, text)]}.

    The texts then exclude it. Recipes without a group come first, under an empty name.
    """
    parts = {name: text.split(". ", 2) for name, text in abouts.items()}
    seconds = Counter(words[1].rstrip(".") for words in parts.values() if len(words) > 1)
    found: dict[str, list[tuple[str, str]]] = {"": []}
    for name, words in parts.items():
        status = words[1].rstrip(".") if len(words) > 1 else ""
        if seconds[status] > 1:
            rest = ". ".join([words[0], *words[2:]])
            found.setdefault(status, []).append((name, rest if rest.endswith(".") else f"{rest}."))
        else:
            found[""].append((name, abouts[name]))
    return {status: ours for status, ours in found.items() if ours}


def _check_name(name: str) -> None:
    """Raise ConfigError with the nearest names unless there is a packaged recipe `name`."""
    from engine.config import tree

    names = tree.recipes()
    if name not in names:
        hint = did_you_mean(name, names, f"choose one of {', '.join(names)}")
        raise ConfigError(f"unknown name: {name}", key="recipe", hint=hint)
