"""The page of plans: a step on imagined ranks, how long its sequences are, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config.schema import Config
from engine.data.profile import describe
from engine.data.scan import Documents
from engine.planner.estimate import of_plans
from engine.planner.plan import Ints, StepPlan
from engine.planner.settings import PlanSettings
from engine.report.boxes import simulated
from engine.report.cost_curve import cost_picture, costs_of
from engine.report.histogram import histogram_picture
from engine.report.memory_page import memory_figure
from engine.report.page import Figure, Page, Table
from engine.report.timeline import some_ranks, timeline_picture
from engine.report.words import NAMES, cell, machine
from engine.simulator.facts import Facts

_TOLD = (
    "sequences",
    "tokens",
    "micro_batches",
    "offloaded_micro_batches",
    "max_degree",
    "max_peers",
    "balance",
    "makespan_s",
    "lower_bound_s",
    "ring_bytes",
    "planning_s",
)
PERCENTILES = ("p50", "p90", "p99")


@dataclass(frozen=True)
class Planned:
    """A config's plans of some steps (one at least), and their facts, as `plan --json` has them."""

    config: Config
    settings: PlanSettings
    plans: Sequence[StepPlan]
    facts: Sequence[Facts]


def plan_page(planned: Planned) -> Page:
    """Return the page; its pictures are of the first step."""
    return Page(
        title=planned.config.recipe,
        kind="a ByteScale plan",
        head=machine(planned.config, planned.plans[0], planned.settings.costs.source),
        figures=[
            _timeline(planned),
            _lengths(planned.plans[0].lengths, planned.config.context),
            _costs(planned),
            _memory(planned),
        ],
        tables=[_table(planned.facts)],
    )


def _timeline(planned: Planned) -> Figure:
    plan = planned.plans[0]
    found = simulated(plan, planned.settings)
    staged = plan.mode == "pipeline"
    what = "one pass of a micro-batch through a rank's first stage" if staged else "one micro-batch"
    caption = (
        f"The first step as the simulator runs it, until the last micro-batch is done. A box is {what}, boxes that "
        "touch from row to row share rings, and the hatched end of a box is the part in which it waits for transfers "
        "alone (in truth spread over its rounds). Where a row is empty, its rank waits for others or is done."
        + some_ranks(found)
    )
    return Figure.of("Timeline of a step", caption, lambda size: timeline_picture(found, size))


def _lengths(lengths: Ints, context: int) -> Figure:
    data = describe(Documents(lengths), context)
    marks = {name: data[name] for name in PERCENTILES}
    caption = (
        "The sequences of the first step by length, each bucket up to the length at its right end: few long ones hold "
        "much of the tokens. Half of the sequences are no longer than p50."
    )
    return Figure.of("Lengths", caption, lambda size: histogram_picture(data["buckets"], marks, size=size))


def _costs(planned: Planned) -> Figure:
    found = costs_of(planned.plans[0], planned.settings, float(planned.facts[0]["makespan_s"]))
    caption = (
        "What a sequence of the first step takes, forward and backward, at the rates of a full-speed rank: the curve "
        "on one rank, a dot on each rank of the ring that the plan gave it. Where the curve is above the dashed line, "
        "a sequence alone would take longer uncut than the whole step."
    )
    return Figure.of("Cost against length", caption, lambda size: cost_picture(found, size))


def _memory(planned: Planned) -> Figure:
    return memory_figure(of_plans(planned.config, planned.settings, planned.plans))


def _table(facts: Sequence[Facts]) -> Table:
    """Return a row a fact and a column a step."""
    rows = [(NAMES.get(name, name), *(cell(fact, name) for fact in facts)) for name in _TOLD]
    columns = ("", *(f"step {step}" for step in range(1, len(facts) + 1))) if len(facts) > 1 else ()
    return Table("The plans in numbers" if columns else "The plan in numbers", rows, columns)
