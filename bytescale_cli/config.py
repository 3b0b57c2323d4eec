"""`bytescale config`: the resolved config."""

from __future__ import annotations

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, Overrides

app = typer.Typer(help="Show the resolved config.")


@app.callback()
def group() -> None:
    """Keep `config` a group of commands: without a callback Typer would turn its only command into `config` itself."""


@app.command()
def show(overrides: Overrides = None, json: Json = False, debug: Debug = False) -> None:
    """Print every value after all overrides. Lengths are in tokens, sizes in bytes."""
    from engine.config.load import load, resolved_yaml

    config = load(overrides or [])
    output.emit({"config": config.model_dump(mode="json")}, resolved_yaml(config), as_json=json)
