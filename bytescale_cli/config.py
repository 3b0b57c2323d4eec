"""`bytescale config`: the resolved config."""

from __future__ import annotations

import json as json_text
from typing import Annotated

import typer

from bytescale_cli import output
from bytescale_cli.options import ConfigFile, Debug, Json, Overrides, with_config

app = typer.Typer(help="Show the resolved config.")


@app.callback()
def group() -> None:
    """Keep `config` a group of commands: without a callback Typer would turn its only command into `config` itself."""


@app.command()
def show(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Also show the file and line that set each value, or the command line.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Print every value after all overrides. Lengths are in tokens, sizes in bytes."""
    from engine.config.load import load, resolved_yaml
    from engine.config.resolved import flat

    given = with_config(overrides, config_file)
    config = load(given)
    values = config.model_dump(mode="json")
    answer = {"config": values}
    text = resolved_yaml(config)
    if origin:
        from engine.config.keys import leaf_of
        from engine.config.origin import origins

        places = origins(given)
        answer["origin"] = places
        # Keys of a source that are not set have no place of their own, only that of data.sources.
        shown = {key: places.get(key) or places[leaf_of(key)] for key in flat(values)}
        rows = [[key, json_text.dumps(value), shown[key]] for key, value in flat(values).items()]
        text = output.table(["key", "value", "set by"], rows)
    output.emit(answer, text, as_json=json)
