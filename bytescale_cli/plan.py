"""`bytescale plan`: plans steps without any GPU and without torch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, Overrides, Plot, check_steps, plot_path, whole_number

if TYPE_CHECKING:
    from engine.config.schema import Config
    from engine.planner.plan import StepPlan
    from engine.planner.settings import PlanSettings

_SHOWN = (
    "sequences",
    "tokens",
    "micro_batches",
    "offloaded_micro_batches",
    "max_degree",
    "max_peers",
    "balance",
    "makespan_s",
    "lower_bound_s",
    "planning_s",
)
_CHANGED = {"least_ranks": "least ranks of the longest sequence", "ring_ranks": "ring members"}
_SHORT = {"offloaded_micro_batches": "offloaded"}  # a column no wider than need be
_LEGEND = "balance: useful work of a rank over the makespan, 1 at best; lower_bound_s: no plan takes less"


def plan(
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="How many steps to plan.")] = 1,
    plot: Plot = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Plan steps without any GPU. Shows rings, micro-batches and balance."""
    check_steps(steps, "--steps")
    path = plot_path(plot)
    from engine.config.load import load
    from engine.data.lengths import step_lengths
    from engine.planner.make import plan_step
    from engine.planner.settings import PlanSettings
    from engine.planner.ways import ways_out
    from engine.simulator.facts import facts

    config = load(overrides or [])
    output.say_when_compiling()
    with ways_out(config):
        settings = PlanSettings.of(config)
    plans: list[StepPlan] = []
    found: list[dict[str, Any]] = []
    for lengths in step_lengths(config, steps):
        started = time.perf_counter()
        with ways_out(config):
            plans.append(plan_step(lengths, settings))
        seconds = time.perf_counter() - started
        told = {"planning_s": seconds, "verified": True}  # plan_step verifies
        found.append({**facts(plans[-1], settings), **told, "without_offload": _without_offload(plans[-1], settings)})
    if path is not None:
        from engine.report.plan_page import Planned, plan_page

        output.write_page(path, plan_page(Planned(config, settings, plans, found)).html())
    offload = _offload(config, found) if settings.offload else []
    text = "\n".join([_head(config, plans[0], settings), _steps(found), _LEGEND, *offload, "", _rings(plans)])
    output.emit({"plan": found[0], "steps": found}, text, as_json=json)


def _head(config: Config, plan: StepPlan, settings: PlanSettings) -> str:
    from engine.config.units import counted
    from engine.report.words import hdp_ranks, source

    parallel = config.parallel
    ranks = f"{hdp_ranks(plan.ranks, parallel.tp, parallel.pp)} x capacity {counted(plan.capacity, 'token')}"
    lengths = f"{source(config)} up to context {config.context:,}"
    return f"planner {plan.planner}, {ranks}, {plan.mode} mode; {lengths}; rates of {settings.costs.source}"


def _steps(found: list[dict[str, Any]]) -> str:
    """Return a line a step."""
    rows = [[str(number), *(_cell(fact[name]) for name in _SHOWN)] for number, fact in enumerate(found, start=1)]
    return output.table(["step", *(_SHORT.get(name, name) for name in _SHOWN)], rows, right=True)


def _without_offload(plan: StepPlan, settings: PlanSettings) -> dict[str, Any] | None:
    """Return the facts of the same step planned without offload; None where nothing is offloaded, or it must be."""
    from engine.errors import MemoryFitError
    from engine.planner.make import plan_step
    from engine.simulator.facts import facts

    if not plan.offload.any():
        return None
    plain = settings.without_offload()
    try:
        return dict(facts(plan_step(plan.lengths, plain), plain))
    except MemoryFitError:
        return None


def _offload(config: Config, found: list[dict[str, Any]]) -> list[str]:
    """Return what is offloaded in the step that offloads most, to which host memory, and what would be without it."""
    from engine.cluster.cluster import Cluster
    from engine.config.units import format_bytes

    offloading = sum(fact["offloaded_micro_batches"] > 0 for fact in found)
    if not offloading:
        shorten = "the step" if len(found) == 1 else f"any of the {len(found)} steps"
        return [f"offload: allowed, and not used: it would not shorten {shorten}"]
    step, fact = max(enumerate(found, start=1), key=lambda numbered: numbered[1]["offloaded_share"])
    of = f", the most of {offloading} steps that offload" if offloading > 1 else ""
    devices = Cluster.of(config.cluster).largest_node
    needs, has = fact["host_bytes"], config.cluster.host_memory
    memory = (
        f"{format_bytes(needs)} a device of {format_bytes(has)}, "
        f"{format_bytes(needs * devices)} a node of {format_bytes(has * devices)}"
    )
    share = fact["offloaded_micro_batches"] / fact["micro_batches"]
    saved = f"{fact['offloaded_share']:.1%} of all that is saved"
    lines = [f"offload in step {step}{of}: {share:.1%} of the micro-batches, {saved}; host at most {memory}"]
    without = fact["without_offload"]
    if without is None:
        return [*lines, "without it the step does not fit"]
    return [*lines, f"without -> with it: {'; '.join(_changes(without, fact))}"]


def _changes(without: dict[str, Any], fact: dict[str, Any]) -> list[str]:
    from engine.config.units import format_bytes

    ranks = [f"{name} {without[key]:,} -> {fact[key]:,}" for key, name in _CHANGED.items()]
    sent = f"ring bytes {format_bytes(without['ring_bytes'])} -> {format_bytes(fact['ring_bytes'])}"
    before, after = without["makespan_s"], fact["makespan_s"]
    return [*ranks, sent, f"makespan_s {before:.3f} -> {after:.3f} ({before / after:.3f} times as fast)"]


def _rings(plans: list[StepPlan]) -> str:
    """Return a line a ring size: how many sequences of all steps have it, and their tokens."""
    import numpy as np

    degrees = np.concatenate([plan.degrees for plan in plans])
    lengths = np.concatenate([plan.lengths for plan in plans])
    rows = []
    for degree in np.unique(degrees).tolist():
        chosen = lengths[degrees == degree]
        share = chosen.sum() / lengths.sum()
        rows.append([str(degree), f"{len(chosen):,}", f"{chosen.sum():,}", f"{share:.1%}", f"{chosen.max():,}"])
    return output.table(["ring", "sequences", "tokens", "share", "longest"], rows, right=True)


def _cell(value: float) -> str:
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}"
