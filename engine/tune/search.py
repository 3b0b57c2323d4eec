"""Search the settings with the shortest simulated step: cheap checks first, then real plans of the most promising.

1. Settings that break a rule of the config, or do not fit in memory, are left out.
2. The others get a lower bound of their step time. A bound above the slowest of the best five, or above the fastest of
   the same layout, excludes a candidate.
3. The rest are planned and simulated, the most promising first: those of the least expected step time, corrected by
   what simulations of the same layout showed. The search also ends when its time is over.

The bound of the static planner is nearly its step time (planner/baselines/static_bound.py), so few of its settings are
simulated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from engine.config.checks import check
from engine.config.schema import BASELINE
from engine.cost.budget import least
from engine.errors import ConfigError, MemoryFitError
from engine.fit.estimate import Estimate, estimate_fullest, estimate_plans
from engine.fit.problem import fit_problem
from engine.fit.suggestions import as_overrides, with_values
from engine.job import Job
from engine.planner.checks import check_planner
from engine.planner.make import plan_step
from engine.planner.planners import PLANNERS
from engine.simulator.compare import mean_outcome
from engine.simulator.facts import Facts
from engine.tune.space import capacities, layouts, more_capacities
from engine.units import NS, PPM, Ints

SHOWN = 5  # how many of the best are kept
_NEAR = 1.25  # static: layouts with bounds up to this many times the least get more capacities
_EQUAL = 1e-6  # step times whose relative difference is smaller count as equal

INVALID = "break a rule of the config"
TOO_LARGE = "do not fit in memory"
UNPLANNED = "cannot be planned"
BOUNDED = "have a lower bound above the step time of those in the table, or of the one with their layout"
UNTRIED = "were not simulated, and may be faster: the time limit (--seconds) was reached"
SLOWER = "were simulated and are slower, or differ only in capacity and offload"


@dataclass(frozen=True)
class Candidate:
    """Settings that fit."""

    changes: dict[str, Any]  # by config key
    job: Job
    bound_s: float  # lower bound of the step time, in s

    @cached_property
    def expected_s(self) -> float:
        """The step time, in s, if all micro-batches were equal and filled the capacity, each rank busy for the bound.

        A tight bound leaves nothing out. Otherwise this adds copies to the host and gathers that
        take longer than the compute of a micro-batch, slots, and the time in which stages of a pipeline wait for the
        first and the last micro-batch.
        """
        own, costs, step = self.job.settings, self.job.costs, self.job.config.batch_tokens
        if PLANNERS[own.planner].tight_bound:
            return self.bound_s
        count = max(1, -(-step // (own.ranks * own.capacity)))
        tokens = min(own.capacity, step // own.ranks)
        away = min(own.offload, least(costs, own.capacity, own.capacity, own.device_memory)) / PPM
        most = float(costs.shares.max())  # of the slowest stage
        compute, copied = self.bound_s * NS / most / count, costs.rates.copy * away * tokens
        gather_f, gather_b = costs.gathers
        one = max(compute / 3, copied, gather_f) + max(2 * compute / 3, copied, gather_b)
        return costs.seconds(one * (count + own.stages - 1) * most + count * costs.slot)

    @property
    def shape(self) -> tuple[Any, ...]:
        """Its settings without the capacity."""
        return *self.layout, self.job.config.offload.ratio

    @property
    def layout(self) -> tuple[Any, ...]:
        """The best five differ in at least one of these."""
        config = self.job.config
        return config.parallel.tp, config.parallel.pp, config.parallel.ep, config.zero.stage, config.recompute


@dataclass(frozen=True)
class Trial:
    """A simulated candidate: facts of its steps, as in simulator/compare.py, and the most memory of a device."""

    candidate: Candidate
    facts: Facts
    memory: Estimate

    @property
    def step_s(self) -> float:
        return float(self.facts["step_s"])

    @property
    def device_s_per_token(self) -> float:
        """Seconds of all devices together per token."""
        devices = int(self.facts["ranks"]) * self.candidate.job.costs.devices
        return devices / float(self.facts["tokens_per_s"])

    def parts(self) -> dict[str, float]:
        """Seconds of the step by what a rank does, on average over ranks."""
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
    shown: int = SHOWN  # the requested number of best settings
    own: Trial | None = None  # the unchanged recipe; None if it does not fit or cannot be planned
    trials: list[Trial] = field(default_factory=list)
    fallen: dict[str, Fallen] = field(default_factory=dict)  # by reason

    def best(self) -> list[Trial]:
        """The fastest trial of each layout, the fastest first, at most `shown`. Of equal ones, that of least memory."""
        return list(self._fastest().values())[: self.shown]

    @property
    def left(self) -> int:
        """How many settings were not simulated although they may be among the best. The search is complete if none."""
        return self.fallen[UNTRIED].count if UNTRIED in self.fallen else 0

    def excluded(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """The candidates whose lower bound shows that they are not among the best.

        They are slower than the last of the best, or not faster than a trial of their layout.
        """
        fastest = self._fastest()
        last = list(fastest.values())[self.shown - 1].step_s if len(fastest) >= self.shown else float("inf")
        of_layout = {layout: min(last, trial.step_s) for layout, trial in fastest.items()}
        return [one for one in candidates if one.bound_s >= of_layout.get(one.layout, last) * (1 - _EQUAL)]

    def _fastest(self) -> dict[tuple[Any, ...], Trial]:
        """The fastest trial by layout, the fastest first."""
        fastest: dict[tuple[Any, ...], Trial] = {}
        for trial in sorted(self.trials, key=lambda one: (one.step_s, one.memory.peak)):
            fastest.setdefault(trial.candidate.layout, trial)
        return fastest

    def most_promising(self, candidates: Sequence[Candidate]) -> Candidate:
        """The candidate with the least expected time, times the least ratio of a step to it in trials of its layout.

        The ratio is 1 without such trials.
        """
        ratios: dict[tuple[Any, ...], float] = {}
        for trial in self.trials:
            ratio, layout = trial.step_s / trial.candidate.expected_s, trial.candidate.layout
            ratios[layout] = min(ratio, ratios.get(layout, ratio))
        return min(candidates, key=lambda one: one.expected_s * ratios.get(one.layout, 1.0))

    def drop(self, reason: str, example: str = "", count: int = 1) -> None:
        """Count candidates that fall off."""
        one = self.fallen.setdefault(reason, Fallen(example=example))
        one.count += count

    def candidates(self, job: Job, fixed: Collection[str]) -> Iterator[Candidate]:
        """Yield the candidates that fit; count the others."""
        config, found = job.config, []
        for changes in layouts(config, fixed):
            named = as_overrides(changes)
            values = with_values(config, changes)
            problems = check(values)
            if problems:
                self.drop(INVALID, f"{named}: {problems[0].key}: {problems[0].message}")
                continue
            try:
                layout = job.with_config(values)
                check_planner(layout.settings)
            except ConfigError as error:  # of a hostfile, or a planner that cannot plan in this mode
                self.drop(UNPLANNED, f"{named}: {error.problems[0].message}")
                continue
            sizes = [config.capacity] if "capacity" in fixed else capacities(layout)
            for candidate in self._sized(changes, layout, sizes or [config.capacity]):
                found.append(candidate)
                yield candidate

        # A mesh has few micro-batches per rank, so its time depends much on how well they fill it. A tight bound is
        # cheap, so more capacities are tried for layouts that may be the fastest.
        if not PLANNERS[config.planner.name].tight_bound or "capacity" in fixed or not found:
            return
        near = _NEAR * min(one.bound_s for one in found)
        tried = {(one.shape, one.job.config.capacity) for one in found}
        for first in {one.shape: one for one in found if one.bound_s <= near}.values():
            changes = {key: value for key, value in first.changes.items() if key != "capacity"}
            sizes = [one for one in more_capacities(first.job.settings) if (first.shape, one) not in tried]
            yield from self._sized(changes, first.job, sizes)

    def _sized(self, changes: dict[str, Any], layout: Job, sizes: Iterable[int]) -> Iterator[Candidate]:
        """Yield the candidates of a layout with these capacities that fit; count the others."""
        for capacity in sizes:
            own = layout.with_config(layout.config.model_copy(update={"capacity": capacity}))
            candidate = self.fitting(changes | {"capacity": capacity}, own)
            if candidate is not None:
                yield candidate

    def fitting(self, changes: dict[str, Any], job: Job) -> Candidate | None:
        """The candidate with its lower bound; None, and counted, if it does not fit."""
        problem = fit_problem(job)
        if problem is not None:
            self.drop(TOO_LARGE, f"{as_overrides(changes)}: {problem.message}")
            return None
        settings, costs = job.settings, job.costs
        bound = PLANNERS[settings.planner].bound
        bounds = [costs.seconds(bound(lengths, settings) + costs.step - costs.most_hidden) for lengths in self.steps]
        return Candidate(changes, job, sum(bounds) / len(bounds))

    def trial(self, candidate: Candidate) -> Trial | None:
        """Plan and simulate the steps; None, and counted, if they cannot be planned."""
        job, settings = candidate.job, candidate.job.settings
        try:
            plans = [plan_step(lengths, settings) for lengths in self.steps]
        except (ConfigError, MemoryFitError) as error:
            self.drop(UNPLANNED, f"{as_overrides(candidate.changes)}: {error.problems[0].message}")
            return None
        # The largest micro-batch that a plan may contain; in a pipeline, plans may need more for those in flight.
        memory = [estimate_fullest(job), estimate_plans(job, plans)]
        return Trial(candidate, mean_outcome(plans, settings), max(memory, key=lambda one: one.peak))


def tuned_static(
    job: Job,
    steps: Sequence[Ints],
    deadline: float,
    *,
    with_own: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Search:
    """Search the fastest settings of the static planner for a job; arguments as of `search`."""
    planner = job.config.planner.model_copy(update={"name": BASELINE})
    static = job.with_config(job.config.model_copy(update={"planner": planner}))
    return search(static, steps, deadline, shown=1, with_own=with_own, clock=clock)


def search(
    job: Job,
    steps: Sequence[Ints],
    deadline: float,
    fixed: Collection[str] = (),
    *,
    shown: int = SHOWN,
    with_own: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Search:
    """Search the `shown` fastest settings for `steps`, the lengths of each, [S]; `fixed` keys keep their value.

    No simulation begins after `deadline`, in seconds of `clock`, except the first. The job itself is simulated
    first, if it fits and unless `with_own` is false.
    """
    found = Search(steps, shown)
    # Of settings with the same plans, those of the smallest capacity come first: they need the least memory.
    left = sorted(found.candidates(job, fixed), key=lambda one: (one.bound_s, one.job.config.capacity))
    # It is simulated even if there is no time.
    own = next((one for one in left if with_own and one.job.config == job.config), None)
    while left:
        # Each trial may lower the time to beat, and so exclude further settings by their bounds.
        excluded = found.excluded(left)
        for one in excluded:
            found.drop(BOUNDED, _bounded(one))
        numbers = set(map(id, excluded))
        left = [one for one in left if id(one) not in numbers]
        if not left:
            break
        if found.trials and clock() > deadline:
            found.drop(UNTRIED, _bounded(left[0]), len(left))
            break
        candidate = own or found.most_promising(left)
        own, left = None, [one for one in left if one is not candidate]
        trial = found.trial(candidate)
        if trial is not None:
            found.trials.append(trial)
            found.own = trial if candidate.job.config == job.config else found.own
    slower = len(found.trials) - len(found.best())
    if slower:
        found.drop(SLOWER, count=slower)
    return found


def enough_nodes(job: Job, steps: Sequence[Ints], fixed: Collection[str], deadline: float) -> int | None:
    """Return a number of nodes, usually the fewest, with which some settings fit; None if none is found in time.

    Also None with a hostfile. It tries powers of two times the config's nodes, then numbers below the first that is
    enough, and no new one after `deadline`, in seconds of `time.monotonic()`.
    """

    def fits(nodes: int) -> bool:
        larger = job.with_config(with_values(job.config, {"cluster.nodes": nodes}))
        return any(Search(steps).candidates(larger, fixed))

    short = job.config.cluster.nodes
    if job.config.cluster.hostfile is not None:
        return None
    while not fits(enough := 2 * short):
        short = enough
        if time.monotonic() > deadline:
            return None
    while enough - short > 1 and time.monotonic() < deadline:
        middle = (short + enough) // 2
        short, enough = (short, middle) if fits(middle) else (middle, enough)
    return enough


def _bounded(candidate: Candidate) -> str:
    return f"{as_overrides(candidate.changes)}: at least {candidate.bound_s:.3f} s"


def behind(trial: Trial, best: Trial) -> str:
    """Why a trial is slower than the best: the part of the step that grows most."""
    parts, least = trial.parts(), best.parts()
    part = max(parts, key=lambda name: parts[name] - least[name])
    return f"+{max(0.0, parts[part] - least[part]):.3f} s {part}"
