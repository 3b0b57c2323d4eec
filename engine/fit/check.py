"""Check whether a config fits in memory: used by estimate-memory, plan, simulate, profile-data and train alike."""

from __future__ import annotations

from collections.abc import Collection

from engine.config.schema import Config
from engine.errors import MemoryFitError
from engine.fit.problem import fit_problem
from engine.fit.suggestions import suggestions
from engine.planner.checks import check_planner
from engine.planner.settings import PlanSettings


def fit_error(config: Config, settings: PlanSettings, fixed: Collection[str] = ()) -> MemoryFitError | None:
    """The error for a config that does not fit, with suggestions that change no `fixed` key; None if it fits."""
    check_planner(settings)
    problem = fit_problem(config, settings)
    if problem is None:
        return None
    found = suggestions(config, settings, fixed)
    hints = [*map(str, found)] or [problem.hint or ""]
    if found and problem.key == "context":  # a shorter context is the simplest change
        hints.append(f"context={settings.ranks * settings.least_capacity}")
    error = MemoryFitError(problem.message, key=problem.key, hint="; or ".join(hints))
    error.found = {"ways": [one.as_json() for one in found]}
    return error


def check_fit(config: Config, settings: PlanSettings, fixed: Collection[str] = ()) -> None:
    """Raise MemoryFitError (exit code 10) if the config does not fit.

    Its suggestions leave the keys in `fixed` unchanged.
    """
    error = fit_error(config, settings, fixed)
    if error is not None:
        raise error
