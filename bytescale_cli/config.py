"""`bytescale config`: the config that overrides end in."""

from __future__ import annotations

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, Overrides

app = typer.Typer(help="Show the resolved config.")


@app.callback()
def group() -> None:
    """Make `config` a group although it has one command so far."""


@app.command()
def show(overrides: Overrides = None, json: Json = False, debug: Debug = False) -> None:
    """Print every value as it will be used. Lengths are in tokens, sizes in bytes."""
    from engine.config.load import load, resolved_yaml

    config = load(overrides or [])
    output.emit({"config": config.model_dump(mode="json")}, resolved_yaml(config), as_json=json)
