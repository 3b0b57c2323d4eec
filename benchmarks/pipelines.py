"""What slices, teams and an order of their own gain in pipelines: makespan over the lower bound, and idle time.

`python benchmarks/pipelines.py recipe` prints, for the first step of each mix and seed of llama70b-2m-paper: without
slices in 1F1B order, with an order of its own, with slices too, with slices in teams, and with several rounds of a ring
in one call of attention, which is the plan of `adaptive`. With `paper` it prints them for the first steps of the
paper's 70B row, under the assumptions of paper.yaml.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver, paper
from engine.config.load import load
from engine.data.lengths import step_lengths
from engine.job import Job
from engine.planner.adaptive import pipeline
from engine.planner.adaptive.slots import slot_candidates
from engine.planner.adaptive.workload import lower_bound, workload_of
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.simulator.timeline import simulate
from engine.units import NS, Ints

STEPS = 4


def steps_of_recipe(mix: str) -> Iterator[tuple[PlanSettings, Ints]]:
    """Yield the settings and the lengths of the first step, for each seed."""
    for seed in range(STEPS):
        config = load(["recipe=llama70b-2m-paper", f"lengths={mix}", f"run.seed={seed}"])
        (lengths,) = step_lengths(config, 1, lambda _: None)
        yield Job(config).settings, lengths


def steps_of_paper(context: str) -> Iterator[tuple[PlanSettings, Ints]]:
    """Yield the settings and the lengths of the first steps of the paper's 70B row."""
    settings = replace(paper.settings_of("llama70b", context), offload=0)
    for lengths in paper.steps_of("llama70b", "github", context)[:STEPS]:
        yield settings, lengths


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    for mix in ("github", "byted"):
        yield f"recipe/{mix}", partial(rows, mix, steps_of_recipe(mix))
    for context in paper.CONTEXTS:
        yield f"paper/{context}", partial(rows, context, steps_of_paper(context))


def rows(name: str, steps: Iterator[tuple[PlanSettings, Ints]]) -> Iterator[driver.Row]:
    """Yield a row for each step, and their means: makespan / lower bound and idle time in percent, by means."""
    found = list[driver.Row]()
    for number, (settings, lengths) in enumerate(steps):
        bound = lower_bound(lengths, settings)
        row: driver.Row = {"of": name, "step": number, "bound_s": bound / NS}
        for means, (plan, used) in plans(lengths, settings).items():
            line = simulate(plan, used)
            row[means] = line.makespan / bound
            row[f"idle_%, {means}"] = round(100 * (1 - (line.compute + line.exposed) / line.makespan))
        began = time.process_time()
        plan = plan_step(lengths, settings)
        row["plan_s"] = time.process_time() - began
        found.append(row | {"cuts": plan.slices - plan.sequences, "largest_team": int(plan.team.max())})
        yield found[-1]
    figures = [key for key, value in found[0].items() if isinstance(value, float)]
    yield {"mean of": name} | {key: sum(row[key] for row in found) / len(found) for key in figures}


def plans(lengths: Ints, settings: PlanSettings) -> dict[str, tuple[StepPlan, PlanSettings]]:
    """Return the plans to compare, each with one more means, and the settings with which they are timed."""
    rates = settings.costs.rates
    one_round = replace(settings, costs=replace(settings.costs, rates=rates._replace(rounds_per_call=1)))
    alone = replace(settings, costs=replace(settings.costs, rates=rates._replace(rounds_per_call=1, team=1)))
    workload = workload_of(lengths, alone)
    found = {"1F1B": (pipeline.uncut_pipeline(workload, slot_candidates(workload, alone), alone), alone)}
    targets, pipeline.TARGETS = pipeline.TARGETS, pipeline.TARGETS[:1]
    found["own order"] = pipeline.pipeline_plan(lengths, alone), alone
    pipeline.TARGETS = targets
    found["slices"] = pipeline.pipeline_plan(lengths, alone), alone
    found["slices in teams"] = pipeline.pipeline_plan(lengths, one_round), one_round
    found["several rounds a call"] = pipeline.pipeline_plan(lengths, settings), settings
    return found


if __name__ == "__main__":
    sys.exit(driver.main(__doc__, cases))
