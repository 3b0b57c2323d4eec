"""`bytescale train`: trains the model of a recipe, or shows what training would do."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import (
    ConfigFile,
    Debug,
    Json,
    Overrides,
    choice,
    config_as_typed,
    load_with_weights,
    named_as_typed,
    say_toys,
    whole_number,
    with_aliases,
    with_config,
)
from bytescale_cli.terminal import pasteable
from engine.errors import BytescaleError, ConfigError

if TYPE_CHECKING:
    from engine.config.schema import Config
    from engine.launch.joined import Joined

LAUNCHERS = ("local", "hostfile", "slurm", "k8s")
_SHOWN_COMMANDS = 2
_REPORT_S = 10.0


def train(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and plan three steps, but start nothing.")] = False,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH|URL",
            help="Start from the newest checkpoint (auto), from scratch (never), or from PATH or URL.",
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
            help="Where ranks run: here, on the hostfile's hosts, on nodes of Slurm, in pods of Kubernetes.",
        ),
    ] = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Run folder; sets run.out.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train the model of a recipe."""
    from engine.launch.joined import joined

    aliases = {
        ("--nproc", "cluster.ranks_per_node"): nproc,
        ("--hostfile", "cluster.hostfile"): hostfile,
        ("--out", "run.out"): out,
    }
    given = with_aliases(with_config(overrides, config_file), aliases)
    with config_as_typed(config_file), named_as_typed(aliases):
        place = joined(os.environ, terminal=os.isatty(0)) if launcher in (None, "slurm") else None
        with _silent_unless_first(place):
            submitted = launcher in ("slurm", "k8s") and not place
            config = load_with_weights([*given, *(place.settings(given) if place else [])], elsewhere=submitted)
        if place and not place.first:
            from engine.launch.join import take_part
            from engine.run.folder import RunFolder

            sys.exit(0 if dry_run else take_part(place, RunFolder(Path(config.run.out))))
        if submitted and launcher:
            from_where = None if resume == "auto" else resume
            flags = {"--config": config_file, "--nproc": nproc, "--out": out, "--resume": from_where}
            typed = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
            words = ["train", *(overrides or []), *typed]
            nodes_given = any(text.startswith("cluster.nodes=") for text in given)
            _hand_over(config, launcher, words, resume, dry_run, nodes_given, json, debug)
            return
        output.say_when_compiling()

        from bytescale_cli.progress import progress
        from engine.launch.run import train as launch

        with ExitStack() as stack:
            say, on_step = stack.enter_context(progress(None if dry_run else config.run.steps))
            joins = None
            if place:
                from engine.launch.join import Joins
                from engine.run.folder import RunFolder

                joins = Joins(place, RunFolder(Path(config.run.out)), os.environ)
                if not dry_run:
                    stack.enter_context(joins)
            payload = launch(
                config, resume=resume, launcher=launcher, dry_run=dry_run, say=say, on_step=on_step, joins=joins
            )
    if dry_run:  # else it was said before the first step
        say_toys(config, "model", "documents")
    text = _describe(payload["dry_run"]) if dry_run else payload["train"]["out"]
    output.emit(payload, text, as_json=json)


@contextmanager
def _silent_unless_first(place: Joined | None) -> Iterator[None]:
    """End with the code of an error, but without its message, if the first process of the launch reports the same.

    torchrun ends all processes as soon as one fails, so the others leave the first one time for that.
    """
    try:
        yield
    except BytescaleError as error:
        if place is None or place.first:
            raise
        time.sleep(_REPORT_S)
        sys.exit(int(error.code))


def _hand_over(
    config: Config,
    launcher: str,
    words: list[str],
    resume: str,
    dry_run: bool,
    nodes_given: bool,
    json: bool,
    debug: bool,
) -> None:
    """Submit the run, or start it on the nodes of the allocation in which this command runs."""
    from engine.launch import slurm
    from engine.launch.submit import hand_over

    allocated = slurm.allocated_nodes(os.environ) if launcher == "slurm" else None
    if allocated is None:
        payload = hand_over(config, launcher, words, resume, dry_run, output.say)
        (result,) = payload.values()
        output.emit(payload, result["script"] if dry_run else result.get("job") or result["text"], as_json=json)
        return
    nodes = config.cluster.nodes if nodes_given else allocated
    if nodes > allocated:
        hint = "leave it out, or ask Slurm for more nodes"
        raise ConfigError(f"this allocation has {allocated}", key=f"cluster.nodes={nodes}", hint=hint)
    command = slurm.srun_command(nodes, [*words, *(["--json"] if json else []), *(["--debug"] if debug else [])])
    if not dry_run:
        sys.exit(slurm.run_srun(command))
    dry = {"dry_run": {"launcher": launcher, "nodes": nodes, "commands": [shlex.join(command)]}}
    output.emit(dry, pasteable(shlex.join(command), sys.stdout), as_json=json)


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
    if dry.get("not_forwarded"):
        lines.append(f"nor these, which ranks are not known to need: {', '.join(dry['not_forwarded'])}")
    if dry.get("withheld") or dry.get("not_forwarded"):
        lines.append("to forward one, add its name to BYTESCALE_FORWARD, a list with commas")
    commands = dry["commands"]
    lines = [output.fill(line) for line in lines]
    lines += [pasteable(command, sys.stdout) for command in commands[:_SHOWN_COMMANDS]]
    if len(commands) > _SHOWN_COMMANDS:
        listed = "all" if len(commands) == dry["nodes"] else f"{len(commands):,}"
        lines.append(f"and {dry['nodes'] - _SHOWN_COMMANDS:,} more like these (--json lists {listed})")
    if commands:
        lines.append(f"and on each node for each rank: {dry['program']}")
    return "\n".join(lines)
