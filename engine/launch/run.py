"""Trains the model of a recipe: checks the config, prepares the run folder, and runs the ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from engine.cluster.cluster import Cluster
from engine.config.not_built import not_trained
from engine.config.schema import Config
from engine.cost.model import Costs
from engine.errors import ConfigError, MemoryFitError, PreflightError
from engine.files import remove_ruins
from engine.fit.check import check_fit
from engine.fit.host import host_problem, tight, waits_for_checkpoints
from engine.fit.machine import on_this_machine
from engine.launch import prepare
from engine.launch.checks import check_launch, gpu_problem, idle_gpus, not_launchable
from engine.launch.copies import copies
from engine.launch.dry_run import PLANNED, dry_run_of
from engine.launch.environment import environment_problem, forwarded
from engine.launch.host_adam import check_host_adam
from engine.launch.join import Joins
from engine.launch.outcome import facts, outcome
from engine.launch.place import check_place
from engine.launch.ranks import unfailing
from engine.launch.say import OnStep, Say
from engine.launch.stragglers import with_speeds
from engine.launch.supervise import supervise
from engine.run.checkpoints import newest_first
from engine.run.folder import RunFolder
from engine.run.remote import Remote
from engine.trackers.following import following


def train(
    config: Config,
    resume: str = "auto",
    launcher: str | None = None,
    dry_run: bool = False,
    say: Say = print,
    on_step: OnStep = lambda line: None,
    joins: Joins | None = None,
) -> dict[str, Any]:
    """Train the model of a recipe, or show what training would do; return what the command prints as JSON.

    `resume` is `auto`, `never`, or the path or URL of a checkpoint or of a run's checkpoints. `launcher` is `local`,
    `hostfile`, or None if the user chose none; with `joins`, somebody else has started the processes of the other
    nodes. `say` gets messages, and `on_step` the metrics of each step. Raises BytescaleError: for a mistake, before
    anything is written, or with the cause of the first rank that failed.
    """
    say = unfailing(say)
    cluster_of = joins.cluster if joins else Cluster.of
    config = with_speeds(config, cluster_of(config.cluster), say)
    cluster = cluster_of(config.cluster)
    folder = RunFolder(Path(config.run.out))
    check_launch(config, cluster, launcher)
    refused = not_launchable(config, cluster, joins is not None)
    if not_trained(config) and not dry_run:
        raise ConfigError.of(refused)  # before the fit: a smaller model would not train either
    check_fit(config, {"cluster.nodes"})  # the nodes are those of this start, so more are not suggested
    if refused and not dry_run:
        raise ConfigError.of(refused)
    of_gpus = gpu_problem(config, cluster)
    unready = [problem for problem in (of_gpus, environment_problem(config, os.environ)) if problem]
    if unready and not dry_run:
        raise PreflightError.of(unready)
    if of_gpus is None:  # else this is not the machine on which the run will be
        config, lowered = on_this_machine(config, cluster)
        cluster = cluster_of(config.cluster)
        for line in (*lowered, idle_gpus(config, cluster)):
            if line:
                say(line)
    check_place(folder, config)
    remote = Remote(config.run.remote) if config.run.remote else None
    with prepare.locked(folder), following(config.run.trackers, folder, say, on_step) as followed:
        if not dry_run:
            remove_ruins(folder.checkpoints, folder.root)  # first: it may free the space of a full disk
            if joins:
                joins.publish()
                if joins.joined.restarted and resume != "auto" and newest_first(folder.checkpoints):
                    say(f"this is a restart of the job: it goes on with {folder.root}, not with --resume {resume}")
                    resume = "auto"
        resume = prepare.fetched(folder, config, remote, resume, dry_run, say)
        steps = PLANNED if dry_run else 1
        start = prepare.plan_start(folder, config, cluster.ranks, resume, steps, say, hashes=dry_run)
        host_too_small = host_problem(start.plans[:1], config, cluster)
        if dry_run:
            refused += [problem for problem in (*unready, host_too_small) if problem]
            joined_at = joins.address if joins else None
            return {"dry_run": dry_run_of(config, cluster, folder, start, refused, joined_at)}
        if host_too_small:
            raise MemoryFitError.of([host_too_small])
        check_host_adam(config, say)
        if resume != "never" or not folder.resolved.exists():
            with copies(folder.checkpoints, remote, start.step, say):
                return _train(config, cluster, folder, start, resume, say, followed, joins)
        if joins:
            joins.withdraw()  # the folder is renamed
        say(f"the old run is now in {prepare.set_aside(folder)}")
    # A new folder: the old one was renamed with its lock.
    with (
        prepare.locked(folder),
        following(config.run.trackers, folder, say, on_step) as followed,
        copies(folder.checkpoints, remote, 0, say),
    ):
        if joins:
            joins.publish()
        return _train(config, cluster, folder, start, "auto", say, followed, joins)


def _train(
    config: Config,
    cluster: Cluster,
    folder: RunFolder,
    start: prepare.Start,
    resume: str,
    say: Say,
    on_step: OnStep,
    joins: Joins | None,
) -> dict[str, Any]:
    """Run the remaining steps in a locked run folder, and return what the command prints as JSON."""
    parameters = Costs.of(config).parameters
    prepare.write_facts(folder, config, start.corpora, parameters)
    of_host = tight(config, cluster), waits_for_checkpoints(config, cluster)
    for line in (*facts(config, cluster, start.corpora, parameters), *of_host):
        if line:
            say(line)
    if not joins and (withheld := forwarded(os.environ, cluster).withheld):
        say(f"not forwarded to other hosts, because they look like secrets: {', '.join(withheld)}")
    if config.run.chaos:
        folder.chaos.mkdir(exist_ok=True)
        say("run.chaos=true: `bytescale chaos` may harm this run")
    notice = config.run.notice_file
    if notice and Path(notice).exists():
        say(f"warning: run.notice_file={notice} exists, so the run ends after a step; remove it to train longer")
    last = supervise(config, cluster, folder, start, resume, say, on_step, joins)
    return outcome(config, folder, last, say)
