"""`bytescale train`: trains the model of a recipe, or shows what training would do."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import (
    ConfigFile,
    Debug,
    Json,
    Overrides,
    about_documents,
    choice,
    chosen,
    config_as_typed,
    load_with_weights,
    named_as_typed,
    say_toys,
    whole_number,
    with_aliases,
    with_config,
)
from bytescale_cli.terminal import pasteable
from engine.errors import BytescaleError, ConfigError, RunFolderError

if TYPE_CHECKING:
    from engine.config.schema import Config
    from engine.launch.schedulers.joined import Joined
    from engine.run.folder import RunFolder

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
            help="Continue the run in the folder PATH, or begin a new one from the checkpoint PATH or URL, with the "
            "config of its run unless a recipe is named; a URL needs a recipe. auto: continue the run in run.out, if "
            "there is one; never: start over.",
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
    """Train the model of a recipe.

    Unless run.out is set, a run gets a new folder: runs/RECIPE, or runs/RECIPE-2 and so on if that is taken.
    """
    from engine.launch.schedulers.joined import joined
    from engine.run.folder import RunFolder

    aliases = {
        ("--nproc", "cluster.ranks_per_node"): nproc,
        ("--hostfile", "cluster.hostfile"): hostfile,
        ("--out", "run.out"): out,
    }
    given = with_aliases(with_config(overrides, config_file), aliases)
    if not given and resume == "auto" and not dry_run:
        hint = "`bytescale train recipe=quickstart` trains a small model here; `bytescale recipes list` shows all"
        raise ConfigError("no recipe is named", key="recipe", hint=hint)
    note: str | None = None
    with config_as_typed(config_file), named_as_typed(aliases), ExitStack() as claim:
        place = joined(os.environ, terminal=os.isatty(0)) if launcher in (None, "slurm") else None
        # The processes of a launcher must agree on the folder, and a requeued job must find it again.
        of_job = place is not None or "SLURM_JOB_ID" in os.environ
        quiet = bool(place and not place.first)
        with _silent_unless_first(place):
            given, resume = _continued(given, resume, quiet)
            given = chosen(given, quiet, of_job)
            submitted = launcher in ("slurm", "k8s") and not place
            config = load_with_weights([*given, *(place.settings(given) if place else [])], elsewhere=submitted)
        # Schedulers start this command once for each node or rank. The first process becomes the launcher, which the
        # others join.
        if place and not place.first:
            from engine.launch.schedulers.join import take_part

            sys.exit(0 if dry_run else take_part(place, RunFolder(Path(config.run.out))))
        # Without run.out, a run gets a new folder. It is created now, so that no other command can use it. A requeued
        # job must find its folder again, so a job uses the recipe's.
        if (
            not of_job
            and not any(text.startswith("run.out=") for text in given)
            and config.run.out == f"runs/{config.recipe}"
        ):
            first = Path(config.run.out)
            out = str(claim.enter_context(_new_folder(first, dry_run)))
            if RunFolder(first).resolved.exists() and out != str(first):
                note = f"this run is in {out}; to continue the one in {first}, add --resume {shlex.quote(str(first))}"
            config = config.model_copy(update={"run": config.run.model_copy(update={"out": out})})
            given.append(f"run.out={out}")
        # Slurm or Kubernetes will run the same command line on its own machines.
        if submitted and launcher:
            words = ["train", *given, *(["--resume", resume] if resume != "auto" else [])]
            nodes_given = any(text.startswith("cluster.nodes=") for text in given)
            _hand_over(config, launcher, words, resume, dry_run, nodes_given, json, debug)
            return
        output.say_when_compiling()

        from bytescale_cli.progress import progress
        from engine.launch.run import train as launch

        # Closes the progress bar and the connections to other nodes after an error, too.
        with ExitStack() as stack:
            say, on_step = stack.enter_context(progress(None if dry_run else config.run.steps))
            joins = None
            if place:
                from engine.launch.schedulers.join import Joins

                joins = Joins(place, RunFolder(Path(config.run.out)), os.environ)
                if not dry_run:
                    stack.enter_context(joins)
            payload = launch(
                config,
                resume=resume,
                launcher=launcher,
                dry_run=dry_run,
                say=about_documents(given, say),
                on_step=on_step,
                joins=joins,
                note=note,
            )
    if dry_run:  # otherwise it was printed before the first step
        say_toys(config, "model", "documents")
    text = _describe(payload["dry_run"]) if dry_run else payload["train"]["out"]
    output.emit(payload, text, as_json=json)


def _continued(given: list[str], resume: str, quiet: bool) -> tuple[list[str], str]:
    """Return the overrides and `--resume` for the run or checkpoint that `--resume` names, else those given.

    The config is that of the run, unless a recipe is named; a line says so, unless `quiet`. Only the folder of a run
    continues in place, and only without `run.out`. Raises ConfigError if there is no config, or no folder for a new
    run; CheckpointError if there is nothing to resume from.
    """
    from engine.run.folder import RunFolder

    keys = {text.split("=", 1)[0] for text in given}
    if resume in ("auto", "never"):
        return given, resume
    in_place = "run.out" not in keys and RunFolder(Path(resume)).resolved.is_file()
    if "recipe" not in keys:
        run = _run_of(resume)
        if "run.out" not in keys and not in_place:
            hint = f"add run.out=DIR, or continue the run itself: --resume {shlex.quote(str(run.root))}"
            raise ConfigError("is not set, and a checkpoint begins a new run", key="run.out", hint=hint)
        given = [f"recipe={run.resolved}", *given]
        if not quiet:
            output.say(f"continuing with the config {run.resolved}")
    return ([*given, f"run.out={resume}"], "auto") if in_place else (given, resume)


def _run_of(resume: str) -> RunFolder:
    """Return the run that `--resume` names, or in whose `checkpoints` it names one, with an intact config.

    Raises ConfigError if the config is missing, damaged or of a newer version; CheckpointError if nothing can be
    resumed from there.
    """
    from engine.config.resolved import read_resolved
    from engine.run.checkpoints import newest_first
    from engine.run.folder import RunFolder
    from engine.run.remote import is_url
    from engine.run.saved import check_exists, find

    hint = "name the recipe of the run: recipe=NAME or --config FILE"
    if is_url(resume):  # which is not shown: it may contain a password
        raise ConfigError("a URL has checkpoints, but not the resolved.yaml of their run", key="--resume", hint=hint)
    check_exists(resume)
    path = Path(resume)
    run = RunFolder(path)
    # If it is not a run folder, it must be a checkpoint or a folder of checkpoints. A checkpoint in RUN/checkpoints
    # belongs to RUN; copies elsewhere have no config.
    if not run.resolved.is_file():
        find(path)
        path = path if path.parent.name else path.absolute()
        if path.parent.name == run.checkpoints.name:
            run = RunFolder(path.parent.parent)
    if not run.resolved.is_file():
        raise ConfigError(f"{run.resolved}, the config of the run, is missing", key=f"--resume {resume}", hint=hint)
    saved = shlex.quote(str(next(iter(newest_first(run.checkpoints)), "CHECKPOINT")))
    recipe = f"restore this file, or continue with its recipe: bytescale train recipe=NAME --resume {saved}"
    read_resolved(run.resolved, recipe)
    return run


@contextmanager
def _new_folder(first: Path, dry_run: bool) -> Iterator[Path]:
    """Create the first of `first`, `first`-2, `first`-3, ... that does not exist; a dry run only names it.

    Of several commands at the same time, each gets another. It is removed at the end if nothing was written to it.
    """
    number, folder = 1, first
    while True:
        try:
            if not dry_run:
                folder.mkdir(parents=True)
                break
            if not os.path.lexists(folder):
                break
        except FileExistsError:
            pass
        except OSError as error:
            message, hint = f"cannot be created: {error.strerror}", "choose another folder with run.out=DIR"
            raise RunFolderError(message, key=str(folder), hint=hint) from error
        number += 1
        folder = first.with_name(f"{first.name}-{number}")
    try:
        yield folder
    finally:
        with suppress(OSError):
            if not dry_run:
                folder.rmdir()


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
    from engine.launch.schedulers import slurm
    from engine.launch.schedulers.submit import hand_over

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
    """Format a dry run as text: the planner, where the run begins, problems that would stop it, steps and commands."""
    from engine.config.units import counted
    from engine.report.words import hdp_ranks

    ranks = hdp_ranks(dry["hdp_ranks"], dry["tp"], dry["pp"])
    documents = "documents" if dry["documents"] is None else counted(dry["documents"], "document")
    first = f"planner {dry['planner']}, {ranks}, {dry['mode']} mode; {documents} from {dry['source']}"
    if dry["plan_source"] != dry["source"]:  # the two commands read different documents, so their steps differ
        first += f" (`bytescale plan` reads {dry['plan_source']})"
    # All problems are listed, because a dry run looks for them and does not stop at the first one.
    lines = [first, f"{dry['out']}: {dry['outlook']}"]
    if dry["refused"]:
        lines.append("problems that would stop a run without --dry-run:")
        lines += [
            f"  {one['key']}: {one['message']}" + (f"; {one['hint']}" if one["hint"] else "") for one in dry["refused"]
        ]
    if dry["steps"]:
        rows = [[f"{v:.3f}" if isinstance(v, float) else f"{v:,}" for v in step.values()] for step in dry["steps"]]
        lines.append(output.table(list(dry["steps"][0]), rows, right=True))
    # Only names of variables are shown: their values may be secret.
    if dry.get("forwarded"):
        lines.append(f"other hosts also get from this environment: {', '.join(dry['forwarded'])}")
    if dry.get("withheld"):
        lines.append(f"but not these, which look like secrets: {', '.join(dry['withheld'])}")
    if dry.get("not_forwarded"):
        lines.append(f"nor these, which ranks are not known to need: {', '.join(dry['not_forwarded'])}")
    if dry.get("withheld") or dry.get("not_forwarded"):
        lines.append("to forward one, add its name to BYTESCALE_FORWARD, a comma-separated list")
    # Commands are not wrapped, so that they can be pasted.
    commands = dry["commands"]
    lines = [output.fill(line) for line in lines]
    lines += [pasteable(command, sys.stdout) for command in commands[:_SHOWN_COMMANDS]]
    if len(commands) > _SHOWN_COMMANDS:
        listed = "all" if len(commands) == dry["nodes"] else f"{len(commands):,}"
        lines.append(f"and {dry['nodes'] - _SHOWN_COMMANDS:,} more like these (--json lists {listed})")
    if commands:
        lines.append(f"and on each node for each rank: {dry['program']}")
    return "\n".join(lines)
