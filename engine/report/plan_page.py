"""The page of `plan`: one step on simulated ranks, the lengths of its sequences, their costs, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.data.profile import describe
from engine.data.scan import Documents
from engine.fit.estimate import estimate_plans
from engine.job import Job
from engine.planner.plan.step_plan import StepPlan
from engine.report import headline
from engine.report.boxes import simulated
from engine.report.charts import cost_curve, cost_picture, histogram_picture
from engine.report.memory_page import memory_figure
from engine.report.page import Figure, Page, Table
from engine.report.timeline import some_ranks, timeline_picture
from engine.report.words import BALANCE, BOUND, MAKESPAN, NAMES, PLAN_FACTS, cell, machine
from engine.simulator.facts import Facts

PERCENTILES = ("p50", "p90", "p99")


@dataclass(frozen=True)
class Planned:
    """Plans of one or more steps of a job, and for each plan the facts that `plan --json` prints."""

    job: Job
    plans: Sequence[StepPlan]
    facts: Sequence[Facts]


def plan_page(planned: Planned) -> Page:
    """Build the page of some plans. Its charts show the first step."""
    # All charts show the same step, the first, so that they can be compared; the table has all steps.
    plan, config, settings = planned.plans[0], planned.job.config, planned.job.settings
    found = simulated(plan, settings)
    lengths = describe(Documents(plan.sequence_lengths), config.context)
    marks = {name: lengths[name] for name in PERCENTILES}
    curve = cost_curve(plan, settings, float(planned.facts[0]["makespan_s"]))
    box = "one pass of a micro-batch through the first stage" if plan.mode == "pipeline" else "one micro-batch"
    timeline_caption = (
        f"The first step as simulated, until the last rank finishes. Each box is {box}. Boxes that touch across rows "
        "share rings. The hatched end of a box is the time spent waiting for transfers; it is drawn in one piece, "
        "although the waiting is spread over the rounds of the rings. Where a row is empty, the rank is "
        "waiting for others or has finished." + some_ranks(found)
    )
    lengths_caption = (
        "Lengths of the first step's sequences, as percentages of all sequences and of all tokens: a few long ones may "
        "contain most tokens. Each bucket includes the length at its right end. p50 is the median."
    )
    cost_caption = (
        "Time to compute a sequence, forward and backward, against its length, on full-speed ranks. The curve is the "
        "time on one rank; each dot is the time of a ring of the plan. Where the curve is above the dashed line, an "
        "unsplit sequence alone would take longer than the whole step."
    )

    # A single step needs no column names.
    steps = len(planned.facts)
    rows = [(NAMES.get(name, name), *(cell(fact, name) for fact in planned.facts)) for name in PLAN_FACTS]
    columns = ("", *(f"step {step}" for step in range(1, steps + 1))) if steps > 1 else ()
    title = "Key numbers of the plans" if steps > 1 else "Key numbers of the plan"
    return Page(
        title=config.recipe,
        kind="a ByteScale plan",
        headline=headline.of_plan(plan, planned.facts[0], config),
        head=machine(config, plan, settings.costs.source),
        figures=[
            Figure.of("Timeline of a step", timeline_caption, lambda size: timeline_picture(found, size)),
            Figure.of("Lengths", lengths_caption, lambda size: histogram_picture(lengths["buckets"], marks, size=size)),
            Figure.of("Time against length", cost_caption, lambda size: cost_picture(curve, size)),
            memory_figure(estimate_plans(planned.job, planned.plans)),
        ],
        tables=[Table(title, rows, columns, f"{MAKESPAN} {BALANCE} {BOUND}")],
    )
