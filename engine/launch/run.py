"""Trains the model of a recipe: checks the config, prepares the run folder, and runs the ranks."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.cluster.hosts import is_local
from engine.config.devices import uses_gpus
from engine.config.schema import Config
from engine.errors import ConfigError, MemoryFitError, PreflightError, Problem
from engine.files import free_name
from engine.fit.check import check_fit
from engine.fit.host import host_problem, tight, waits_for_checkpoints
from engine.fit.machine import on_this_machine
from engine.folders import remove_ruins
from engine.job import Job
from engine.launch import prepare
from engine.launch.agents.data_plane import ray_problem
from engine.launch.agents.environment import environment_problem
from engine.launch.agents.ranks import unfailing
from engine.launch.checks.launchable import (
    check_launch,
    gpu_problem,
    idle_gpus,
    not_launchable,
    same_host,
    shared_cores,
)
from engine.launch.checks.place import check_place
from engine.launch.checks.ready import Need, unready
from engine.launch.copies import copies
from engine.launch.dry_run import PLANNED, dry_run_of
from engine.launch.launch import Launch
from engine.launch.outcome import facts, outcome
from engine.launch.say import OnStep, Say
from engine.launch.schedulers.join import Joins
from engine.launch.stragglers import with_speeds
from engine.launch.supervise import requests_to_stop, supervise
from engine.run.checkpoints import newest_first
from engine.run.folder import held
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
    note: str | None = None,
) -> dict[str, Any]:
    """Train the model of a recipe, or show what training would do; return what the command prints as JSON.

    `resume` is `auto`, `never`, or the path or URL of a checkpoint or of a run's checkpoints. `launcher` is `local`,
    `hostfile`, or None if the user chose none; with `joins`, a scheduler has started the processes of the other nodes.
    `say` gets messages, and `on_step` the metrics of each step. `note` is a message for a launch that is not refused.
    Raises BytescaleError: for a wrong config, before anything is written, or with the cause of the first rank that
    failed.
    """
    launch = Launch(Job(config), unfailing(say), joins)
    with ExitStack() as lock:
        if not dry_run:
            # From here on, a request to stop has its exit code.
            lock.enter_context(requests_to_stop(launch.folder))
        launch, refused = _checked(launch, launcher, dry_run)
        config, folder, say = launch.job.config, launch.folder, launch.say
        remote = Remote(config.run.remote) if config.run.remote else None
        lock.enter_context(prepare.locked(folder))
        if not dry_run:
            remove_ruins(folder.checkpoints, folder.root)  # first: it may free the space of a full disk
            if joins:
                joins.publish()
                if joins.joined.restarted and resume != "auto" and newest_first(folder.checkpoints):
                    say(f"this is a restart of the job: it continues with {folder.root}, not with --resume {resume}")
                    resume = "auto"
        resume = prepare.fetched(launch, remote, resume, dry_run)
        start = prepare.plan_start(launch, resume, PLANNED if dry_run else 1, hashes=dry_run)
        host_too_small = host_problem(start.plans[:1], launch.job)
        if dry_run:
            if resume == "never" and folder.resolved.exists():
                say(f"a run would rename the folder of the old run to {free_name(folder.root)}")
            refused += [host_too_small] if host_too_small else []
            if note:
                say(note)
            return {"dry_run": dry_run_of(launch, start, refused)}
        if host_too_small:
            raise MemoryFitError.of([host_too_small])
        # The old run is renamed only after all checks have passed. Other nodes find this launcher through a file in the
        # folder, so it is withdrawn before, and published in the new folder after.
        if resume == "never" and folder.resolved.exists():
            if joins:
                joins.withdraw()
            say(f"the old run is now in {prepare.set_aside(folder)}")
            lock.close()  # it was renamed with the folder
            lock.enter_context(prepare.locked(folder))
            if joins:
                joins.publish()
            resume = "auto"
        with (
            following(config.run.trackers, folder, say, on_step) as followed,
            copies(folder.checkpoints, remote, start.step, say),
        ):
            if note:
                launch.say(note)
            _begin(launch, start)
            with held(folder):
                last = supervise(launch, start, resume, followed)
            return outcome(launch, last)


def _checked(launch: Launch, launcher: str | None, dry_run: bool) -> tuple[Launch, list[Problem]]:
    """Check a launch, before anything is written, and fit its job to this machine. Raises BytescaleError.

    Also returns the problems that a dry run only lists; there are none for a run.
    """
    job, say, joins = launch.job, launch.say, launch.joins
    job = with_speeds(joins.job(job) if joins else job, say)
    config, cluster = job.config, job.cluster
    check_launch(job, launcher)
    refused = not_launchable(job, joins is not None)
    if config.cluster.hostfile is not None and (twice := same_host(cluster, resolve=not dry_run)):
        refused.append(twice)
    check_fit(job, {"cluster.nodes"})  # the nodes are those of this start, so more are not suggested
    if refused and not dry_run:
        raise ConfigError.of(refused)
    of_gpus = gpu_problem(job)
    here = sum(node.devices for node in cluster.nodes if is_local(node.host))
    need = Need(here, cluster.ranks, len(cluster.nodes), uses_gpus(config))
    of_host = unready(need, os.environ) if here and not dry_run else None  # a dry run may describe another machine
    # Ray is looked at before anything is written, because connecting to it may otherwise take minutes.
    used, hosts = config.data.runtime == "ray", len(cluster.nodes)
    of_ray = ray_problem(config.data.ray, hosts, bool(here), os.environ) if used else None
    problems = [problem for problem in (of_gpus, environment_problem(config, os.environ), of_host, of_ray) if problem]
    if problems and not dry_run:
        raise PreflightError.of(problems)
    if of_gpus is None:  # else this is not the machine on which the run will be
        job, lowered = on_this_machine(job)
        for line in (*lowered, idle_gpus(job), shared_cores(job)):
            if line:
                say(line)
    check_place(launch.folder, job.config)
    return replace(launch, job=job), [*refused, *problems]


def _begin(launch: Launch, start: prepare.Start) -> None:
    """Write the facts of a run to its locked folder, and say them, with what may harm or end it."""
    config, folder, say = launch.job.config, launch.folder, launch.say
    parameters = launch.job.costs.parameters
    prepare.write_facts(folder, config, start.corpora, parameters)
    of_host = tight(launch.job), waits_for_checkpoints(launch.job)
    for line in (*facts(launch, start.corpora, parameters), *of_host):
        if line:
            say(line)
    if withheld := launch.forwarded().withheld:
        say(f"not forwarded to other hosts, because they look like secrets: {', '.join(withheld)}")
    if config.run.chaos:
        folder.chaos.mkdir(exist_ok=True)
        say("run.chaos=true: `bytescale chaos` may harm this run")
    notice = config.run.notice_file
    if notice and Path(notice).exists():
        say(f"warning: run.notice_file={notice} exists, so the run ends after a step; remove it to train longer")
