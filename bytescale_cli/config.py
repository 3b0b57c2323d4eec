"""`bytescale config`: the resolved config, its schema, and what its keys mean."""

from __future__ import annotations

import json as json_text
from typing import TYPE_CHECKING, Annotated

import typer

from bytescale_cli import output
from bytescale_cli.options import ConfigFile, Debug, Json, Overrides, chosen, loaded, with_config

if TYPE_CHECKING:
    from engine.config.explain.describe import Key

app = typer.Typer(help="Show the resolved config, its schema, and help for keys.")


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
    from engine.config.load import resolved_yaml
    from engine.config.resolved import flat

    config = loaded(overrides, config_file)
    values = config.model_dump(mode="json")
    answer = {"config": values}
    text = resolved_yaml(config)
    if origin:
        from engine.config.explain.describe import places_of
        from engine.config.keys import leaf_of

        answer["origin"] = places = places_of(config, chosen(with_config(overrides, config_file), quiet=True))
        # Keys of a source that are not set have no separate place, only that of data.sources.
        shown = {key: places.get(key) or places[leaf_of(key)] for key in flat(values)}
        rows = [[key, json_text.dumps(value), shown[key]] for key, value in flat(values).items()]
        text = output.table(["key", "value", "set by"], rows)
    output.emit(answer, text, as_json=json)


@app.command()
def schema(json: Json = False, debug: Debug = False) -> None:
    """Print the JSON schema of a resolved config.

    It has every key, with its type, bounds and meaning. What `config show` prints is valid by it.
    """
    from engine.config.explain.describe import json_schema

    found = json_schema()
    output.emit({"config_schema": found}, json_text.dumps(found, indent=2), as_json=json)


@app.command("help")
def help_(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[KEY|GROUP]", help="For example optimizer.lr, optimizer or planner. Default: a list."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Explain a key, or all keys of a group.

    Shows type, unit, allowed values, default and meaning. Defaults are those of the quickstart, a tiny model;
    `bytescale config show recipe=NAME` prints the values of another recipe.
    """
    from dataclasses import asdict

    from engine.config.explain.describe import describe, overview

    found = overview() if name is None else describe(name)
    parts = [f"{found.name}: {found.about}"] if found.about else []
    if found.options:
        rows = [[f"{found.name}={option}", about] for option, about in found.options.items()]
        parts.append(output.table(["option", "description"], rows))
    parts += map(_explained, found.keys)
    if found.inner:
        parts.append(output.table(["section", "contents"], list(map(list, found.inner.items()))))
        parts.append(f"`bytescale config help {next(iter(found.inner))}` explains the keys of a section")
    output.emit({"help": asdict(found)}, output.fill("\n\n".join(parts)), as_json=json)


def _explained(key: Key) -> str:
    """Format a key: its name, and below it its meaning, its type, an example of a list, and its default."""
    default = f"{key.default_text}, set by {key.set_by}" if key.set_by else key.default_text
    example = f"for example {key.example}" if key.example else None
    facts = [key.about, key.kind, example, f"default in the quickstart: {default}"]
    return "\n".join([output.title(key.key), *(f"  {fact}" for fact in facts if fact)])
