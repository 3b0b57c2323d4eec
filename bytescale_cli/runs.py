"""`bytescale runs`: lists runs, shows their state and the logs of their ranks, and compares them."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, check_named_once, whole_number
from engine.errors import ConfigError, DataError

if TYPE_CHECKING:
    from engine.run.status import Status

app = typer.Typer(help="List runs, show their state and logs, or compare them.")

Run = Annotated[Path, typer.Argument(metavar="RUN", readable=False, help="Run folder.")]


@app.command("list")
def list_(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", readable=False, help="The folder in which the runs are.")
    ] = Path("runs"),
    json: Json = False,
    debug: Debug = False,
) -> None:
    """List the runs in a folder, the one that changed last first. Tokens/s: the median of its steps.

    A run that cannot be read, such as one of another version, is listed with the reason.
    """
    from engine.run.status import runs_in, status

    # One run that cannot be read must not hide the others.
    found, unreadable = list[dict[str, Any]](), list[dict[str, Any]]()
    for run in runs_in(folder):
        try:
            found.append(asdict(status(run)))
        except (ConfigError, DataError) as error:
            unreadable.append({"run": str(run), "reason": str(error)})
        except OSError as error:
            place = f"{Path(error.filename).name}: " if error.filename is not None else ""
            unreadable.append({"run": str(run), "reason": f"{place}{error.strerror}"})
    rows = [
        [
            one["state"],
            f"{one['step']:,}/{one['steps']:,}",
            output.number(one["loss"]),
            output.number(one["tokens_per_s"], decimals=0),
            one["recipe"],
            one["run"],
        ]
        for one in found
    ]
    columns = ["state", "steps", "loss", "tokens/s", "recipe", "run"]
    text = output.table(columns, rows) if rows else f"no runs in {folder}"
    # Reasons and warnings are sentences, too long for columns, so they follow the table.
    text += "".join(f"\n{one['run']}: {one['reason']}" for one in unreadable)
    text += "".join(f"\n{warning}" for one in found for warning in one["warnings"])
    output.emit({"runs": found, "unreadable": unreadable}, output.fill(text), as_json=json)


@app.command("status")
def status_(run: Run, json: Json = False, debug: Debug = False) -> None:
    """Show how far a run is, and why it failed.

    Its losses are those of the last finished step, its speeds medians of the steps, without the first after each start.
    The newest checkpoint is not verified.
    """
    from engine.run.status import status

    found = status(run)
    facts = {
        "recipe": f"{found.recipe}, planner {found.planner}",
        "step": f"{found.step:,} of {found.steps:,}",
        "loss": output.number(found.loss),
        "validation loss": output.number(found.validation_loss),
        "tokens": f"{found.tokens:,}",
        "tokens/s": output.number(found.tokens_per_s, decimals=0),
        "MFU": "-" if found.mfu is None else f"{found.mfu:.1%}",
        "unsplit tokens": "-" if found.unsplit is None else f"{found.unsplit:.1%}",
        "last step": "-"
        if found.changed is None
        else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.changed)),
        "checkpoint": found.checkpoint or "none yet",
    }
    if found.cause is not None:
        facts["cause"] = found.cause
    said = {rank: cause for rank, cause in found.causes.items() if cause not in (found.cause or "")}
    facts |= {f"rank {rank}": f"failed: {cause}" for rank, cause in said.items()}
    if found.warnings:
        facts["warning"] = "; ".join(found.warnings)
    text = output.record(f"{found.run}: {found.state}", list(facts.items()))
    output.emit({"status": asdict(found)}, text, as_json=json)


@app.command()
def logs(
    run: Run,
    rank: Annotated[int | None, typer.Option(parser=whole_number, metavar="N", help="One rank. Default: all.")] = None,
    lines: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Show the last N lines of each.")] = 20,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the last lines of the logs of a run.

    They are those of its ranks; if none has started, those of the agents of its nodes.
    """
    if lines < 1:
        raise ConfigError(f"must be at least 1, not {lines}", key="--lines", hint="for example --lines 20")
    if rank is not None and rank < 0:
        raise ConfigError(f"must be at least 0, not {rank}", key="--rank", hint="for example --rank 0")
    from engine.run.status import log_tail

    found = log_tail(run, rank, lines)
    parts = []
    for one in found:
        source = f"rank {one['rank']}" if "rank" in one else f"node {one['node']}"
        parts.append("\n".join([output.title(f"{source}: {one['path']}"), *one["lines"]]))
    output.emit({"logs": found}, "\n\n".join(parts) or f"no rank of {run} has started", as_json=json)


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", readable=False, help="Two run folders or more.")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare the speeds, losses and configs of runs.

    Speeds are medians of the steps, without the first after each start. Runs that have trained on the same tokens are
    compared by the time of those steps.
    """
    if len(runs) < 2:
        raise ConfigError("needs two run folders or more", key="RUN", hint="bytescale runs compare runs/a runs/b")
    check_named_once(runs)
    from engine.report.headline import of_runs
    from engine.run.folder import RunFolder
    from engine.run.launches import read_launches
    from engine.run.metrics import read_metrics
    from engine.run.speed import faster
    from engine.run.status import config_of, differences, losses, status

    # Everything is read before anything is printed, so that an unreadable run gives an error instead of half a
    # comparison.
    found, configs = [status(run) for run in runs], [config_of(run) for run in runs]
    changed = differences(configs)
    folders = map(RunFolder, runs)
    steps = [(read_metrics(one.metrics), [start.step for start in read_launches(one.launches)]) for one in folders]
    speed = faster(steps, [config.planner.name for config in configs])
    step, then = losses(runs)
    # Folders may have equal names, such as a/run and b/run. Then their paths distinguish them.
    names = [run.name for run in runs] if len({run.name for run in runs}) == len(runs) else list(map(str, runs))
    rows = [_row(name, one) for name, one in zip(names, found, strict=True)]
    common = f"loss at step {step}"
    if step is not None:
        rows = [row | {common: output.number(loss)} for row, loss in zip(rows, then, strict=True)]
    text = f"{of_runs(steps, configs, names).text}\n\n"
    text += output.sections(["run"], {"How far are they?": ["state", "steps", "tokens", "tokens/s", "MFU"]}, rows)
    text += "\n\n" + output.sections(["run"], {"What are their losses?": [common, "loss", "validation loss"]}, rows)
    from engine.report.words import value_texts

    # Only the keys that differ are shown: a config has hundreds.
    cells = [[key, *value_texts(key, values)] for key, values in changed.items()]
    text += f"\n\n{output.title('Where do their configs differ?')}\n"
    text += output.table(["key", *names], cells) if cells else "only in run.out"
    answer: dict[str, Any] = {
        "runs": [asdict(one) for one in found],
        "faster": None if speed is None else asdict(speed),
    }
    answer |= {"differences": changed, "step": step, "losses": then}
    output.emit({"compare": answer}, output.fill(text), as_json=json)


def _row(name: str, one: Status) -> dict[str, str]:
    """Format the figures of a run for the tables of `compare`."""
    return {
        "run": name,
        "state": one.state,
        "steps": f"{one.step:,}/{one.steps:,}",
        "tokens": f"{one.tokens:,}",
        "tokens/s": output.number(one.tokens_per_s, decimals=0),
        "MFU": "-" if one.mfu is None else f"{one.mfu:.1%}",
        "loss": output.number(one.loss),
        "validation loss": output.number(one.validation_loss),
    }
