"""`bytescale train`: trains the model of a recipe, or shows what training would do."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import (
    ConfigFile,
    Debug,
    Json,
    Overrides,
    choice,
    config_as_typed,
    named_as_typed,
    say_toys,
    whole_number,
    with_aliases,
    with_config,
)
from bytescale_cli.terminal import pasteable

LAUNCHERS = ("local", "hostfile")
_SHOWN_COMMANDS = 2


def train(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and plan three steps, but start nothing.")] = False,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="Start from the newest checkpoint (auto), from scratch (never), or from PATH.",
        ),
    ] = "auto",
    nproc: Annotated[
        int | None, typer.Option(parser=whole_number, metavar="N", help="Ranks per node; sets cluster.ranks_per_node.")
    ] = None,
    hostfile: Annotated[
        str | None, typer.Option(metavar="FILE", help="File that lists the hosts; sets cluster.hostfile.")
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            parser=choice(*LAUNCHERS),
            metavar="|".join(LAUNCHERS),
            help="Start ranks locally or on the hostfile's hosts.",
        ),
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Run folder; sets run.out.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train the model of a recipe."""
    from engine.config.load import load

    aliases = {
        ("--nproc", "cluster.ranks_per_node"): nproc,
        ("--hostfile", "cluster.hostfile"): hostfile,
        ("--out", "run.out"): out,
    }
    given = with_aliases(with_config(overrides, config_file), aliases)
    with config_as_typed(config_file), named_as_typed(aliases):
        config = load(given)
        output.say_when_compiling()

        from bytescale_cli.progress import progress
        from engine.launch.run import train as launch

        with progress(None if dry_run else config.run.steps) as (say, on_step):
            payload = launch(config, resume=resume, launcher=launcher, dry_run=dry_run, say=say, on_step=on_step)
    if dry_run:  # else it was said before the first step
        say_toys(config, "model", "documents")
    text = _describe(payload["dry_run"]) if dry_run else payload["train"]["out"]
    output.emit(payload, text, as_json=json)


def _describe(dry: Mapping[str, Any]) -> str:
    """Format a dry run as text: the planner, where the run begins, what would be refused, steps and commands."""
    from engine.config.units import counted
    from engine.report.words import hdp_ranks

    ranks = hdp_ranks(dry["hdp_ranks"], dry["tp"], dry["pp"])
    documents = "documents" if dry["documents"] is None else counted(dry["documents"], "document")
    first = f"planner {dry['planner']}, {ranks}, {dry['mode']} mode; {documents} from {dry['source']}"
    if dry["plan_source"] != dry["source"]:  # the two commands read different documents, so their steps differ
        first += f" (`bytescale plan` reads {dry['plan_source']})"
    lines = [first, f"{dry['out']}: {dry['outlook']}"]
    if dry["refused"]:
        lines.append("problems that would stop a run without --dry-run:")
        lines += [
            f"  {one['key']}: {one['message']}" + (f"; {one['hint']}" if one["hint"] else "") for one in dry["refused"]
        ]
    if dry["steps"]:
        rows = [[f"{v:.3f}" if isinstance(v, float) else f"{v:,}" for v in step.values()] for step in dry["steps"]]
        lines.append(output.table(list(dry["steps"][0]), rows, right=True))
    if dry.get("forwarded"):
        lines.append(f"other hosts also get from this environment: {', '.join(dry['forwarded'])}")
    if dry.get("withheld"):
        lines.append(f"but not these, which look like secrets: {', '.join(dry['withheld'])}")
    commands = dry["commands"]
    lines = [output.fill(line) for line in lines]
    lines += [pasteable(command, sys.stdout) for command in commands[:_SHOWN_COMMANDS]]
    if len(commands) > _SHOWN_COMMANDS:
        listed = "all" if len(commands) == dry["nodes"] else f"{len(commands):,}"
        lines.append(f"and {dry['nodes'] - _SHOWN_COMMANDS:,} more like these (--json lists {listed})")
    if commands:
        lines.append(f"and on each node for each rank: {dry['program']}")
    return "\n".join(lines)
