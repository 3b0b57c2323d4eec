"""Check whether a config fits in memory: used by estimate-memory, plan, simulate, profile-data and train alike."""

from __future__ import annotations

from collections.abc import Collection

from engine.cluster.gpus import visible_gpus
from engine.cluster.hosts import is_local
from engine.config.devices import uses_gpus
from engine.errors import ConfigError, MemoryFitError
from engine.fit.machine import on_this_machine
from engine.fit.problem import fit_problem
from engine.fit.suggestions import suggestions
from engine.job import Job
from engine.planner.checks import check_planner


def fit_error(job: Job, fixed: Collection[str] = (), *, here: bool = True) -> MemoryFitError | None:
    """The error for a config that does not fit, with suggestions that change no `fixed` key; None if it fits.

    With `here`, ranks that would run on this machine must also fit in its memory, if that is less than the config says.
    Raises ConfigError if the planner cannot be used.
    """
    error = _error(job, fixed)
    if error is not None or not here:
        return error
    config = job.config
    ranks = max((node.devices for node in job.cluster.nodes if is_local(node.host)), default=0)
    if uses_gpus(config) and visible_gpus() < ranks:
        return None  # the config describes another machine
    limited, lines = on_this_machine(job)
    error = _error(limited, fixed) if lines else None
    if error is None:
        return None
    (problem,) = error.problems
    found, message = error.found, f"{problem.message} ({'; '.join(lines)})"
    hint = problem.hint
    if config.cluster.hostfile is None and config.cluster.nodes == 1:
        # More ranks of this machine would take memory from these.
        if fewer := fewer_ranks(job):
            hint = "; or ".join([f"use cluster.ranks_per_node={fewer}", *(way["set"] for way in found["ways"])])
        elif not uses_gpus(config) and not found["ways"]:
            hint = "use a smaller model, or a machine with more memory"
    error = MemoryFitError(message, key=problem.key, hint=hint)
    error.found = found
    return error


def fewer_ranks(job: Job) -> int | None:
    """Return the largest number of ranks, below that of the config, that fit in this machine's memory; None if none."""
    config = job.config
    unit = config.parallel.tp * config.parallel.pp * config.parallel.ep

    def fits(units: int) -> bool:
        cluster = config.cluster.model_copy(update={"ranks_per_node": units * unit})
        limited, _ = on_this_machine(job.with_config(config.model_copy(update={"cluster": cluster})))
        try:
            return _error(limited, ()) is None
        except ConfigError:  # of the planner, for this number of ranks
            return False

    # Fewer ranks have more memory each, but also more of the states.
    most = (config.cluster.ranks_per_node - 1) // unit
    tries = sorted({most // 2**shift for shift in range(most.bit_length())}, reverse=True)
    good = next((units for units in tries if fits(units)), 0)
    bad = min((units for units in tries if units > good), default=good + 1)
    while good and bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good * unit or None


def check_fit(job: Job, fixed: Collection[str] = (), *, here: bool = True) -> None:
    """Raise MemoryFitError (exit code 10) if the config does not fit; see `fit_error`."""
    error = fit_error(job, fixed, here=here)
    if error is not None:
        raise error


def _error(job: Job, fixed: Collection[str]) -> MemoryFitError | None:
    """The error for a job that does not fit on the cluster that its config describes."""
    settings = job.settings
    check_planner(settings)
    problem = fit_problem(job)
    if problem is None:
        return None
    found = suggestions(job, fixed)
    hints = [*map(str, found)] or [problem.hint or ""]
    if found and problem.key == "context":  # a shorter context is the simplest change
        hints.append(f"context={settings.ranks * settings.least_capacity}")
    error = MemoryFitError(problem.message, key=problem.key, hint="; or ".join(hints))
    error.found = {"ways": [one.as_json() for one in found]}
    return error
