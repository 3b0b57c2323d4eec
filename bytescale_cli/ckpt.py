"""`bytescale ckpt`: checkpoints, and weights in Hugging Face's form out of them and in."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, choice
from engine.errors import ConfigError

app = typer.Typer(help="List checkpoints; import and export weights. Their form is Hugging Face's.")

_DTYPES = ("bf16", "fp32")


@app.command("list")
def list_(run: Annotated[Path, typer.Argument(help="Run folder.")], json: Json = False, debug: Debug = False) -> None:
    """List a run's checkpoints, newest first. Sizes are compared, hashes are not."""
    from engine.trainer.saved import listed

    found = listed(run)
    rows = [[_cell(one[name]) for name in ("step", "ranks", "bytes")] + [one["path"], _state(one)] for one in found]
    output.emit({"checkpoints": found}, output.table(["step", "ranks", "bytes", "path", ""], rows), as_json=json)


def _cell(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _state(checkpoint: Mapping[str, Any]) -> str:
    return f"damaged: {checkpoint['damaged']}" if checkpoint["damaged"] else ""


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(metavar="HF_FOLDER", help="Folder of config.json and safetensors files.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep a checked copy there.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check weights in Hugging Face's form; print their overrides. Training with these starts from the weights."""
    from engine.config.units import counted
    from engine.weights.copy import import_weights

    found = import_weights(folder, out)
    counts = [counted(found[f"{noun}s"], noun) for noun in ("tensor", "parameter", "shard")]
    output.say(f"{found['out']}: {', '.join(counts)}")
    output.say(f"rotary angles of its own context, where the recipe's are others: {shlex.join(found['angles'])}")
    output.emit({"import": found}, shlex.join(found["overrides"]), as_json=json)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run, or one of its checkpoints.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; must not be there yet.")],
    dtype: Annotated[
        str | None, typer.Option(parser=choice(*_DTYPES), metavar="|".join(_DTYPES), help="The run's, if not given.")
    ] = None,
    shard_size: Annotated[
        str, typer.Option("--shard-size", metavar="SIZE", help="Most bytes of a file, but for larger tensors.")
    ] = "5GiB",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a checkpoint's weights in Hugging Face's form. For transformers, and all who read that form."""
    from engine.config.units import counted, parse_count

    try:
        most = parse_count(shard_size, bytes_=True)
    except ValueError as error:
        raise ConfigError(str(error), key="--shard-size", hint="for example --shard-size 5GiB") from error
    if most < 1:
        raise ConfigError(f"must be at least 1, not {shard_size}", key="--shard-size", hint="for example 5GiB")
    from engine.trainer.export import export_weights

    written = export_weights(source, out, dtype, most, output.say)
    size = f"{counted(written['bytes'], 'byte')} in {counted(written['shards'], 'shard')}"
    output.say(f"step {written['step']}, {written['dtype']}, {size}")
    if written["left_out"]:
        output.say(f"left out, so that logits differ: {', '.join(written['left_out'])}")
    output.emit({"export": written}, written["out"], as_json=json)
