"""`bytescale recipes`: lists recipes and prints their files."""

from __future__ import annotations

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json
from engine.config.spelling import did_you_mean
from engine.errors import ConfigError

app = typer.Typer(help="List recipes, or show one.")


@app.command("list")
def list_(json: Json = False, debug: Debug = False) -> None:
    """List the recipes."""
    from engine.config import tree

    found = [{"name": name, "about": tree.about("recipe", name)} for name in tree.recipes()]
    text = output.table(["recipe", "what it is"], [[one["name"], one["about"]] for one in found])
    output.emit({"recipes": found}, text, as_json=json)


@app.command()
def show(name: str, json: Json = False, debug: Debug = False) -> None:
    """Print a recipe's file. `bytescale config show recipe=NAME` prints every resolved value."""
    from engine.config import tree

    names = tree.recipes()
    if name not in names:
        hint = did_you_mean(name, names, f"choose one of {', '.join(names)}")
        raise ConfigError(f"unknown name: {name}", key="recipe", hint=hint)
    text = (tree.folder() / "recipe" / f"{name}.yaml").read_text(encoding="utf-8")
    output.emit({"recipe": {"name": name, "about": tree.about("recipe", name), "text": text}}, text, as_json=json)
