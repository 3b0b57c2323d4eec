"""Several planners on the same steps: the means of what the simulator says, and speed-ups against the fixed mesh."""

from __future__ import annotations

from collections.abc import Sequence

from engine.planner.make import plan_step
from engine.planner.plan import Ints
from engine.planner.settings import PlanSettings
from engine.simulator.facts import Facts, outcome
from engine.simulator.timeline import simulate

BASELINE = "static"
_SAME = ("planner", "ranks")
_HIGHEST = ("peak_bytes", "host_bytes")  # of all steps: the worst one must fit


def compare(steps: Sequence[Ints], settings: PlanSettings, planners: Sequence[str]) -> list[Facts]:
    """Return one run a planner: means over `steps` (lengths [S] each).

    The baseline comes first, asked for or not, as speed-ups are against it; then `planners` in their order, each once.
    """
    names = dict.fromkeys([BASELINE, *planners])
    runs = [_mean([_outcome(lengths, settings.by(planner)) for lengths in steps]) for planner in names]
    baseline = float(runs[0]["step_s"])
    return [run | {"speedup": baseline / float(run["step_s"])} for run in runs]


def _outcome(lengths: Ints, settings: PlanSettings) -> Facts:
    plan = plan_step(lengths, settings)
    return outcome(plan, settings, simulate(plan, settings))


def _mean(found: list[Facts]) -> Facts:
    """Return the means over steps; tokens a second are those of all steps together, memory is the most."""
    measured = {name: [float(one[name]) for one in found] for name in found[0] if name not in _SAME}
    mean: Facts = {name: sum(values) / len(found) for name, values in measured.items()}
    tokens = sum(rate * step for rate, step in zip(measured["tokens_per_s"], measured["step_s"], strict=True))
    return {
        **{name: found[0][name] for name in _SAME},
        **mean,
        "tokens_per_s": tokens / sum(measured["step_s"]),
        **{name: max(int(one[name]) for one in found) for name in _HIGHEST},
        "steps": len(found),
    }
