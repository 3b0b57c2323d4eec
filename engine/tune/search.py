"""Search the settings with the shortest simulated step: cheap checks first, then real plans of the most promising.

1. Settings that break a rule of the config, or do not fit in memory, are left out.
2. The others get a lower bound of their step time. A bound above the slowest of the best five excludes a candidate.
3. The rest are planned and simulated: first the most promising of each layout, then their other capacities and offload
   ratios. The search also ends when its time is over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.config.checks import check
from engine.config.schema import Config
from engine.errors import ConfigError, MemoryFitError
from engine.fit.estimate import Estimate, estimate_fullest
from engine.fit.problem import fit_problem
from engine.fit.suggestions import as_overrides, with_values
from engine.planner.adaptive.workload import lower_bound
from engine.planner.checks import check_planner
from engine.planner.settings import PlanSettings
from engine.simulator.compare import mean_outcome
from engine.simulator.facts import Facts
from engine.tune.space import capacities, layouts
from engine.units import Ints

SHOWN = 5  # how many of the best are kept

INVALID = "break a rule of the config"
TOO_LARGE = "do not fit in memory"
UNPLANNED = "cannot be planned"
BOUNDED = "have a lower bound above the step time of those in the table"
UNTRIED = "were not simulated: the time was over"
SLOWER = "were simulated and are slower, or differ only in capacity and offload"


@dataclass(frozen=True)
class Candidate:
    """Settings that fit, and a lower bound of the seconds of their step."""

    changes: dict[str, Any]  # by config key
    config: Config
    settings: PlanSettings
    bound_s: float

    @property
    def layout(self) -> tuple[Any, ...]:
        """The best five differ in at least one of these."""
        config = self.config
        return config.parallel.tp, config.parallel.pp, config.zero.stage, config.recompute


@dataclass(frozen=True)
class Trial:
    """A simulated candidate: facts of its steps, as in simulator/compare.py, and its largest micro-batch's memory."""

    candidate: Candidate
    facts: Facts
    memory: Estimate

    @property
    def step_s(self) -> float:
        return float(self.facts["step_s"])

    @property
    def device_s_per_token(self) -> float:
        """Seconds of all devices together per token."""
        devices = int(self.facts["ranks"]) * self.candidate.settings.costs.devices
        return devices / float(self.facts["tokens_per_s"])

    def parts(self) -> dict[str, float]:
        """Seconds of the step by what a rank does, in the mean over ranks."""
        compute, exposed = float(self.facts["compute_s"]), float(self.facts["exposed_comm_s"])
        idle = float(self.facts["bubble"]) * self.step_s
        update = max(0.0, self.step_s - compute - exposed - idle)
        return {"compute": compute, "transfers": exposed, "idle": idle, "reduction and update": update}


@dataclass
class Fallen:
    """How many candidates fall off for one reason, with the first of them as an example."""

    count: int = 0
    example: str = ""


@dataclass
class Search:
    """The state of a search; at its end, the result."""

    steps: Sequence[Ints]
    own: Trial | None = None  # the recipe as it is; None if it does not fit or cannot be planned
    trials: list[Trial] = field(default_factory=list)
    fallen: dict[str, Fallen] = field(default_factory=dict)  # by reason

    def best(self) -> list[Trial]:
        """The fastest trial of each layout, the fastest first, at most `SHOWN`. Of equal ones, that of least memory."""
        fastest: dict[tuple[Any, ...], Trial] = {}
        for trial in sorted(self.trials, key=lambda one: (one.step_s, one.memory.peak)):
            fastest.setdefault(trial.candidate.layout, trial)
        return list(fastest.values())[:SHOWN]

    def drop(self, reason: str, example: str = "", count: int = 1) -> None:
        """Count candidates that fall off."""
        one = self.fallen.setdefault(reason, Fallen(example=example))
        one.count += count

    def candidates(self, config: Config, fixed: Collection[str]) -> Iterator[Candidate]:
        """Yield the candidates that fit; count the others."""
        for changes in layouts(config, fixed):
            named = as_overrides(changes)
            layout = with_values(config, changes)
            problems = check(layout)
            if problems:
                self.drop(INVALID, f"{named}: {problems[0].message}")
                continue
            try:
                settings = PlanSettings.of(layout)
                check_planner(settings)
            except ConfigError as error:  # of a hostfile, or a planner that cannot plan in this mode
                self.drop(UNPLANNED, f"{named}: {error.problems[0].message}")
                continue
            sizes = [config.capacity] if "capacity" in fixed else capacities(layout, settings)
            for capacity in sizes or [config.capacity]:
                own = layout.model_copy(update={"capacity": capacity})
                candidate = self.fitting(changes | {"capacity": capacity}, own, replace(settings, capacity=capacity))
                if candidate is not None:
                    yield candidate

    def fitting(self, changes: dict[str, Any], config: Config, settings: PlanSettings) -> Candidate | None:
        """The candidate with its lower bound; None, and counted, if it does not fit."""
        problem = fit_problem(config, settings)
        if problem is not None:
            self.drop(TOO_LARGE, f"{as_overrides(changes)}: {problem.message}")
            return None
        costs = settings.costs
        bounds = [costs.seconds(lower_bound(lengths, settings) + costs.step) for lengths in self.steps]
        return Candidate(changes, config, settings, sum(bounds) / len(bounds))

    def trial(self, candidate: Candidate) -> Trial | None:
        """Plan and simulate the steps; None, and counted, if they cannot be planned."""
        try:
            facts = mean_outcome(self.steps, candidate.settings)
        except (ConfigError, MemoryFitError) as error:
            self.drop(UNPLANNED, f"{as_overrides(candidate.changes)}: {error.problems[0].message}")
            return None
        return Trial(candidate, facts, estimate_fullest(candidate.config, candidate.settings))


def search(config: Config, steps: Sequence[Ints], deadline: float, fixed: Collection[str] = ()) -> Search:
    """Search the settings for `steps`, the lengths of each, [S]; `fixed` keys keep their value.

    No simulation begins after `deadline`, in seconds of `time.monotonic()`, except the first. The config itself is
    simulated first, if it fits.
    """
    found = Search(steps)
    ranked = by_layout(found.candidates(config, fixed))
    ranked.sort(key=lambda one: one.config != config)  # the recipe as it is comes first, even if there is no time
    for number, candidate in enumerate(ranked):
        best = found.best()
        if len(best) == SHOWN and candidate.bound_s >= best[-1].step_s:
            found.drop(BOUNDED, _bounded(candidate))
            continue
        if found.trials and time.monotonic() > deadline:
            found.drop(UNTRIED, _bounded(candidate), len(ranked) - number)
            break
        trial = found.trial(candidate)
        if trial is not None:
            found.trials.append(trial)
            found.own = trial if candidate.config == config else found.own
    slower = len(found.trials) - len(found.best())
    if slower:
        found.drop(SLOWER, count=slower)
    return found


def by_layout(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort by lower bound: first the best candidate of each layout, then the second of each, and so on.

    So a search that runs out of time has seen all promising layouts.
    """
    seen = Counter[tuple[Any, ...]]()
    turns = list[tuple[int, float, Candidate]]()
    for candidate in sorted(candidates, key=lambda one: one.bound_s):
        turns.append((seen[candidate.layout], candidate.bound_s, candidate))
        seen[candidate.layout] += 1
    return [candidate for *_, candidate in sorted(turns, key=lambda turn: turn[:2])]


def _bounded(candidate: Candidate) -> str:
    return f"{as_overrides(candidate.changes)}: at least {candidate.bound_s:.3f} s"


def behind(trial: Trial, best: Trial) -> str:
    """Why a trial is slower than the best: the part of the step that grows most."""
    parts, least = trial.parts(), best.parts()
    part = max(parts, key=lambda name: parts[name] - least[name])
    return f"+{max(0.0, parts[part] - least[part]):.3f} s {part}"
