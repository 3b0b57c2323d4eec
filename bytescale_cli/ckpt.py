"""`bytescale ckpt`: lists, checks and removes checkpoints; imports and exports weights as Hugging Face folders."""

from __future__ import annotations

import shlex
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, check_at_least, choice, whole_number
from engine.errors import BytescaleError, CheckpointError, ConfigError, DataError

app = typer.Typer(help="List, check, remove, import and export checkpoints.")

_DTYPES = ("bf16", "fp32")


@app.command("list")
def list_(
    run: Annotated[str, typer.Argument(metavar="RUN|URL", help="Run folder, or the URL of its copies.")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the checkpoints of a run, newest first. Checks the sizes of their files, not the hashes."""
    from engine.run.saved import listed

    found = listed(run)
    rows = []
    for one in found:
        numbers = ["-" if one[name] is None else f"{one[name]:,}" for name in ("step", "ranks", "bytes")]
        rows.append([*numbers, one["path"], f"damaged: {one['damaged']}" if one["damaged"] else ""])
    output.emit({"checkpoints": found}, output.table(["step", "ranks", "bytes", "path", ""], rows), as_json=json)


@app.command()
def verify(
    source: Annotated[
        str, typer.Argument(metavar="RUN|CHECKPOINT|URL", help="A run, a checkpoint, or the URL of one.")
    ],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check every byte of a checkpoint or of a run.

    Exits with 5 if a checkpoint is damaged, with 4 if only the ledger is.
    """
    from engine.config.units import counted
    from engine.data.ledger import Ledger
    from engine.run.checkpoints import START_OVER
    from engine.run.folder import RunFolder
    from engine.run.saved import check_all

    found = check_all(source)
    ledger = Ledger(RunFolder(Path(source)).ledger)  # a checkpoint has none, nor has a URL
    of_ledger = ledger.damaged() if ledger.folder.is_dir() else None
    # The hint depends on which other checkpoints are intact.
    damaged = [one for one in found if one["damaged"]]
    error: BytescaleError | None = None
    if damaged:
        are = "is damaged:" if len(damaged) == 1 else "are damaged, such as"
        message = f"{len(damaged)} of {counted(len(found), 'checkpoint')} {are} {Path(damaged[0]['path']).name}"
        hint = START_OVER
        if len(damaged) < len(found):
            hint = "`train` resumes from the newest intact one and keeps the damaged ones aside"
        elif Path(damaged[0]["path"]) == Path(source):  # the others of its run were not checked
            hint = "`bytescale ckpt verify RUN` checks all checkpoints of its run"
        error = CheckpointError(f"{message}: {damaged[0]['damaged']}", key=source, hint=hint)
    rows = [[one["path"], f"damaged: {one['damaged']}" if one["damaged"] else "intact"] for one in found]
    if of_ledger is not None:
        rows.append([str(ledger.folder), f"damaged: {'; '.join(of_ledger)}" if of_ledger else "intact"])
        # A damaged checkpoint costs more than a damaged ledger, so it decides the exit code.
        if of_ledger and error is None:
            message = f"the ledger is damaged: {of_ledger[0]}"
            error = DataError(
                message, key=str(ledger.folder), hint="restore it from a copy; the checkpoints are intact"
            )
    answer = {"checkpoints": found, "ledger": of_ledger}
    output.emit(answer, output.table(["path", ""], rows), as_json=json, error=error)


@app.command()
def inspect(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|CHECKPOINT", readable=False, help="A run, or one of its checkpoints.")
    ],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the contents of a checkpoint. Prints its step, place in the documents, settings and files.

    Checks the sizes of the files, not the hashes. Exits with 5 if one is damaged.
    """
    from dataclasses import asdict

    from engine.config.resolved import flat
    from engine.run.checkpoints import check_sizes, read_manifest
    from engine.run.saved import find

    folder, error = find(source), None
    manifest = read_manifest(folder)
    try:
        check_sizes(folder)
    except CheckpointError as damage:
        error = damage
    state, sizes = asdict(manifest.state), dict(manifest.sizes)
    lines = [str(folder)]
    for name, value in (*state.items(), ("files", {name: f"{size:,} bytes" for name, size in sizes.items()})):
        if isinstance(value, dict):
            known = {key: inner for key, inner in flat(value).items() if inner is not None}
            lines += [f"{name}:", *(f"  {key}: {_text(inner)}" for key, inner in known.items())]
        elif value is not None:
            lines.append(f"{name}: {_text(value)}")
    answer = {"path": str(folder), **state, "files": sizes}
    output.emit({"checkpoint": answer}, "\n".join(lines), as_json=json, error=error)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


@app.command()
def prune(
    run: Annotated[Path, typer.Argument(metavar="RUN", readable=False, help="Run folder.")],
    keep: Annotated[
        int, typer.Option(parser=whole_number, metavar="N", help="Number of newest intact checkpoints to keep.")
    ],
    every: Annotated[
        int, typer.Option(parser=whole_number, metavar="N", help="Also keep those of steps that are multiples of N.")
    ] = 0,
    best: Annotated[
        int, typer.Option(parser=whole_number, metavar="N", help="Also keep N with the lowest validation losses.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove old checkpoints of a run. The newest are checked first: damaged ones among them stay and do not count."""
    check_at_least(1, keep, "--keep")
    check_at_least(0, every, "--every")
    check_at_least(0, best, "--best")
    from engine.config.units import counted
    from engine.run.checkpoints import Retention
    from engine.run.saved import thin_out

    removed = [str(folder) for folder in thin_out(run, Retention(keep, every, best), dry_run, output.say)]
    output.say(f"{'would remove' if dry_run else 'removed'} {counted(len(removed), 'checkpoint')}")
    output.emit({"removed": removed, "dry_run": dry_run}, "\n".join(removed), as_json=json)


@app.command("import")
def import_(
    folder: Annotated[Path, typer.Argument(metavar="HF_FOLDER", help="Folder with config.json and safetensors files.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Also write a checked copy there.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check a Hugging Face folder. Prints the overrides that start training from its weights."""
    from engine.config.units import counted
    from engine.weights.copy import import_weights

    found = import_weights(folder, out)
    counts = [counted(found[f"{noun}s"], noun) for noun in ("tensor", "parameter", "shard")]
    output.say(f"{found['out']}: {', '.join(counts)}")
    output.say("run.weights alone is enough; a recipe made for weights then keeps its rotary embedding (model.rope...)")
    output.emit({"import": found}, shlex.join(found["overrides"]), as_json=json)


@app.command()
def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|CHECKPOINT", readable=False, help="A run, or one of its checkpoints.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; must not exist yet.")],
    dtype: Annotated[
        str | None, typer.Option(parser=choice(*_DTYPES), metavar="|".join(_DTYPES), help="Default: the run's dtype.")
    ] = None,
    shard_size: Annotated[
        str, typer.Option("--shard-size", metavar="SIZE", help="Maximum file size; a larger tensor gets its own file.")
    ] = "5GiB",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Export a checkpoint to a folder that transformers can load."""
    from engine.config.units import counted, parse_count

    try:
        shard_bytes = parse_count(shard_size, bytes_=True)
    except ValueError as error:
        raise ConfigError(str(error), key="--shard-size", hint="for example --shard-size 5GiB") from error
    if shard_bytes < 1:
        raise ConfigError(f"must be at least 1, not {shard_size}", key="--shard-size", hint="for example 5GiB")
    from engine.trainer.export import export_weights

    written = export_weights(source, out, dtype, shard_bytes, output.say)
    size = f"{counted(written['bytes'], 'byte')} in {counted(written['shards'], 'shard')}"
    output.say(f"step {written['step']}, {written['dtype']}, {size}")
    if written["left_out"]:
        names = ", ".join(written["left_out"])
        output.say(f"warning: Hugging Face's format cannot store {names}; the exported model produces different logits")
    output.emit({"export": written}, written["out"], as_json=json)
