"""Simulate several planners on the same steps: means over steps, and speed-ups over the static planner."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.simulator.facts import Facts, outcome
from engine.simulator.timeline import simulate
from engine.units import Ints

BASELINE = "static"
_SAME = ("planner", "ranks")
_HIGHEST = ("peak_bytes", "host_bytes")  # maxima over steps instead of means, because every step must fit


def compare(steps: Sequence[Ints], settings: PlanSettings, planners: Sequence[str]) -> list[Facts]:
    """Simulate `steps` (the lengths of each, [S]) with each planner; returns one dict of facts per planner.

    Facts are means over steps, except for peak memory (maxima) and tokens per second (of all steps together).
    The baseline always comes first, because speed-ups are relative to it; then `planners` in their order, each once.
    """
    runs = []
    for own in map(settings.by, dict.fromkeys([BASELINE, *planners])):
        runs.append(mean_outcome((plan_step(lengths, own) for lengths in steps), own))
    baseline = float(runs[0]["step_s"])
    return [run | {"speedup": baseline / float(run["step_s"])} for run in runs]


def mean_outcome(plans: Iterable[StepPlan], settings: PlanSettings) -> Facts:
    """Simulate the plans of one planner, at least one; facts as in `compare`, without the speed-up."""
    found = [outcome(plan, settings, simulate(plan, settings)) for plan in plans]
    measured = {name: [float(one[name]) for one in found] for name in found[0] if name not in _SAME}
    mean: Facts = {name: sum(values) / len(found) for name, values in measured.items()}
    # Tokens per second: of all steps together, not the mean over steps.
    tokens = sum(rate * step for rate, step in zip(measured["tokens_per_s"], measured["step_s"], strict=True))
    return {
        **{name: found[0][name] for name in _SAME},
        **mean,
        "tokens_per_s": tokens / sum(measured["step_s"]),
        **{name: max(int(one[name]) for one in found) for name in _HIGHEST},
        "steps": len(found),
    }
