"""`bytescale train`: launches a recipe, or shows what would be launched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, Overrides, choice, whole_number, with_aliases

LAUNCHERS = ("local", "hostfile")
_MOST_COMMANDS = 2


def train(
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check, plan three steps, start nothing.")] = False,
    resume: Annotated[str, typer.Option(metavar="auto|never|PATH", help="Where to go on from.")] = "auto",
    nproc: Annotated[
        int | None, typer.Option(parser=whole_number, metavar="N", help="Ranks on a node: cluster.ranks_per_node.")
    ] = None,
    hostfile: Annotated[str | None, typer.Option(metavar="FILE", help="Hosts: cluster.hostfile.")] = None,
    launcher: Annotated[
        str | None, typer.Option(parser=choice(*LAUNCHERS), metavar="|".join(LAUNCHERS), help="How ranks start.")
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Run folder: run.out.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a recipe."""
    from engine.config.load import load

    aliases = {
        ("--nproc", "cluster.ranks_per_node"): nproc,
        ("--hostfile", "cluster.hostfile"): hostfile,
        ("--out", "run.out"): out,
    }
    config = load(with_aliases(overrides or [], aliases))
    output.say_when_compiling()

    from bytescale_cli.progress import progress
    from engine.launch.run import train as launch

    with progress(config.run.steps) as (say, on_step):
        payload = launch(config, resume=resume, launcher=launcher, dry_run=dry_run, say=say, on_step=on_step)
    output.emit(payload, _text(payload), as_json=json)


def _text(payload: Mapping[str, Any]) -> str:
    """Return what a person reads on stdout: what a dry run found, or where a run ended."""
    if "dry_run" not in payload:
        return str(payload["train"]["out"])
    dry = payload["dry_run"]
    return "\n".join(
        [*_head(dry), *_refused(dry["refused"]), *_steps(dry["steps"]), *_commands(dry["commands"], dry["ranks"])]
    )


def _head(dry: Mapping[str, Any]) -> list[str]:
    """Return what was planned, in words that `bytescale plan` has too, and where the run would begin."""
    from engine.config.units import counted
    from engine.report.words import hdp_ranks

    ranks, documents = hdp_ranks(dry["hdp_ranks"], dry["tp"], dry["pp"]), counted(dry["documents"], "document")
    planned = f"planner {dry['planner']}, {ranks}, {dry['mode']} mode; {documents} of {dry['source']}"
    other = f" (`bytescale plan` takes {dry['plan_source']})" if dry["plan_source"] != dry["source"] else ""
    return [planned + other, f"{dry['out']}: {dry['outlook']}"]


def _steps(steps: list[dict[str, Any]]) -> list[str]:
    rows = [[_cell(value) for value in step.values()] for step in steps]
    return [output.table(list(steps[0]), rows, right=True)] if steps else []


def _commands(commands: list[str], ranks: int) -> list[str]:
    if len(commands) <= _MOST_COMMANDS:
        return commands
    has = "all" if len(commands) == ranks else f"{len(commands):,}"
    return [*commands[:_MOST_COMMANDS], f"and {ranks - _MOST_COMMANDS:,} more like these (--json has {has})"]


def _refused(problems: list[dict[str, str]]) -> list[str]:
    """Return what a dry run says of what training would not take: a line each, with the way out."""
    if not problems:
        return []
    lines = [f"  {problem['key']}: {problem['message']} ({problem['hint']})" for problem in problems]
    return ["without --dry-run this is refused:", *lines]


def _cell(value: float) -> str:
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}"
