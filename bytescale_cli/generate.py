"""`bytescale generate`: continues a prompt with the model of a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, whole_number
from engine.errors import ConfigError


def _temperature(text: str) -> float:
    """Parse `--temperature`. Raises BadParameter unless it is a number of 0 or more."""
    try:
        value = float(text)
    except ValueError:
        raise typer.BadParameter(f"must be a number, not {text}") from None
    if not (value >= 0 and math.isfinite(value)):
        raise typer.BadParameter(f"must be at least 0, not {text}")
    return value


def generate(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|FOLDER", readable=False, help="A run, one of its checkpoints, or a Hugging Face folder."
        ),
    ],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.")],
    tokens: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Generate at most N tokens.")] = 100,
    temperature: Annotated[
        float, typer.Option(parser=_temperature, metavar="T", help="0 takes the most probable token; 1 samples.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(parser=whole_number, metavar="S", help="Seed of the sampling.")] = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="bytes|PATH", help="As data.tokenizer. Default: that of the run or the folder."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a text with a trained model, in one process."""
    if tokens < 1:
        raise ConfigError(f"must be at least 1, not {tokens}", key="--tokens", hint="for example --tokens 100")
    if not 0 <= seed < 2**63:
        raise ConfigError(f"must be from 0 to 2**63 - 1, not {seed}", key="--seed", hint="for example --seed 1")
    from engine.trainer.generate import generate as run

    found = run(source, prompt, tokens, temperature, seed, tokenizer, output.say)
    # A model may write the codes that control a terminal.
    text = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in found["text"])
    output.emit({"generate": found}, text, as_json=json)
