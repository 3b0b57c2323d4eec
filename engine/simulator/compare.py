"""Simulate several planners on the same steps: means over steps, and speed-ups over the static planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from engine.config.schema import BASELINE
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.planner.planners import PLANNERS
from engine.planner.settings import PlanSettings
from engine.simulator.facts import Facts, outcome
from engine.simulator.timeline import simulate
from engine.units import Ints

TUNED = f"{BASELINE}, tuned"
_SAME = ("planner", "ranks")
_HIGHEST = ("largest_micro_batch", "peak_bytes", "host_bytes")  # maxima over steps: every step must fit


def rows(settings: PlanSettings, planners: Iterable[str], tuned: PlanSettings | None = None) -> dict[str, PlanSettings]:
    """The settings of each row of a comparison, by its label: the baseline, then `planners` in their order, each once.

    The settings `tuned`, those at which static is the fastest, come second. If offload is on, planners that offload
    by equation 3 have a second row without it (planner/ratios.py).
    """
    found = {BASELINE: settings.by(BASELINE)} | ({} if tuned is None else {TUNED: tuned})
    for planner in planners:
        found[planner] = settings.by(planner)
        if PLANNERS[planner].by_equation_3 and settings.offload and settings.costs.layers > 2:
            found[f"{planner}, no eq. 3"] = replace(found[planner], equation_3=False)
    return found


def compare(steps: Sequence[Ints], compared: Mapping[str, PlanSettings]) -> list[Facts]:
    """Simulate `steps` (the lengths of each, [S]) with each of the settings; returns one dict of facts for each.

    Facts are means over steps, except for memory and `largest_micro_batch` (maxima) and tokens per second (of all steps
    together). Speed-ups are relative to the row `BASELINE`, and `speedup_tuned` to the row `TUNED`, if there is one.
    """
    runs = {label: mean_outcome((plan_step(lengths, own) for lengths in steps), own) for label, own in compared.items()}
    found = []
    for label, run in runs.items():
        own, step_s = compared[label], float(run["step_s"])
        by_equation_3 = PLANNERS[own.planner].by_equation_3 and own.equation_3 and own.offload > 0
        facts: Facts = {"label": label, "tuned": label == TUNED, "equation_3": by_equation_3}
        facts |= run | {"speedup": float(runs[BASELINE]["step_s"]) / step_s}
        found.append(facts | ({"speedup_tuned": float(runs[TUNED]["step_s"]) / step_s} if TUNED in runs else {}))
    return found


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
