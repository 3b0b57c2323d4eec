"""`bytescale data`: packs documents into token files."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, Overrides, whole_number, writable
from engine.errors import ConfigError

app = typer.Typer(help="Pack documents into token files.")

_SECONDS = 5.0  # between two lines of progress


@app.command()
def pack(
    overrides: Overrides = None,
    out: Annotated[str, typer.Option(metavar="PREFIX", help="Write PREFIX.bin, .idx, .hash and .json.")] = "tokens",
    workers: Annotated[
        int | None, typer.Option(parser=whole_number, metavar="N", help="Processes. Default: one per core.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Tokenize the documents of a config into a token file in Megatron's format.

    For example: bytescale data pack data=jsonl data.path=a.jsonl data.tokenizer=tokenizer.json --out a. Train on it
    with data=tokens data.path=a. If it is interrupted, the same command continues.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"must be at least 1, not {workers}", key="--workers", hint="for example --workers 8")
    from dataclasses import asdict

    from engine.config.load import load
    from engine.config.units import counted
    from engine.data.pack import pack as write

    config = load(overrides or [])
    if config.data.format == "tokens":
        hint = "choose documents with data=folder or data=jsonl, and data.path"
        raise ConfigError("is a token file already", key=f"data.path={config.data.path}", hint=hint)
    prefix = Path(str(writable(f"{out}.bin", "--out")).removesuffix(".bin"))
    shown = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if sys.stderr.isatty() or time.monotonic() - shown > _SECONDS:
            shown = time.monotonic()
            output.say(f"{done:,} of {total:,} blocks")

    facts = write(config.data, prefix, workers, progress)
    counts = f"{counted(facts.documents, 'document')}, {counted(facts.tokens, 'token')} of {facts.tokenizer}"
    text = f"{prefix}: {counts}, vocabulary {facts.vocabulary:,}"
    if facts.empty:
        text += f"; {counted(facts.empty, 'empty document')} {'was' if facts.empty == 1 else 'were'} left out"
    use = f"use it with data=tokens data.path={prefix} model.vocab={facts.vocabulary}"
    output.emit({"pack": {"out": str(prefix), **asdict(facts)}}, f"{text}\n{use}", as_json=json)
