"""`bytescale plan`: plans steps without a GPU and without torch."""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import (
    ConfigFile,
    Debug,
    Json,
    Overrides,
    PlotOfPlan,
    Trace,
    about_documents,
    check_steps,
    chosen,
    config_as_typed,
    load_with_weights,
    plot_path,
    say_toys,
    say_warnings,
    trace_path,
    whole_number,
    with_config,
)

if TYPE_CHECKING:
    from engine.job import Job
    from engine.planner.plan.step_plan import StepPlan
    from engine.planner.settings import PlanSettings

_LEGEND = """max_degree: ranks of the largest ring
max_peers: largest number of ranks one rank exchanges data with
makespan_s: modelled time until the last rank finishes
lower_bound_s: no plan of the step can be faster
balance: mean useful work of a rank / makespan, at most 1"""
_SHORT = {"offloaded_micro_batches": "offloaded"}
_QUESTIONS = {  # and the facts that answer them; --json has more
    "What is in a step?": ["sequences", "tokens", "micro_batches", "offloaded"],
    "How good is its plan?": ["max_degree", "max_peers", "balance", "makespan_s", "lower_bound_s", "planning_s"],
}
_RINGS = ("ring size", "sequences", "tokens", "of all tokens", "longest")


def plan(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    steps: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Number of steps to plan.")] = 1,
    plot: PlotOfPlan = None,
    trace: Trace = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Plan steps without a GPU. Shows rings, micro-batches and balance."""
    check_steps(steps, "--steps")
    path, timeline = plot_path(plot, kinds=(".html", ".htm", ".svg")), trace_path(trace)
    import numpy as np

    from engine.config.units import counted
    from engine.data.lengths import corpus_tokens, step_lengths
    from engine.data.scale import is_without_recipe, planned_for, scaled
    from engine.fit.check import check_fit
    from engine.job import Job
    from engine.planner.make import plan_step
    from engine.report.words import MODES, PLAN_FACTS, hdp_ranks, source
    from engine.simulator.facts import facts
    from engine.simulator.hollow import empty_capacity, low_balance, small_corpus

    # Without a recipe, the lengths of the documents choose one.
    with config_as_typed(config_file):
        given = chosen(with_config(overrides, config_file))
        say = cache(about_documents(given))  # each line once: documents may be read twice
        config = scaled(given, say=say)[0] if is_without_recipe(given) else load_with_weights(given, say)
    output.say_when_compiling()
    job = Job(config)
    settings = job.settings
    check_fit(job)
    plans: list[StepPlan] = []
    found: list[dict[str, Any]] = []
    for lengths in step_lengths(config, steps, say):
        started = time.perf_counter()
        plans.append(plan_step(lengths, settings))
        seconds = time.perf_counter() - started
        measured = {"planning_s": seconds, "verified": True}  # plan_step verifies
        facts_of_step = {**facts(plans[-1], settings), **measured}
        found.append(facts_of_step | {"without_offload": _without_offload(plans[-1], settings)})
    # Imported only here, because importing matplotlib takes longer than planning.
    if path is not None and path.suffix.lower() == ".svg":
        from engine.report.plan_picture import plan_picture

        output.write_page(path, plan_picture(plans[0], settings))
    elif path is not None:
        from engine.report.plan_page import Planned, plan_page

        output.write_page(path, plan_page(Planned(job, plans, found)).html())
    if timeline is not None:
        from engine.report.chrome_trace import Process, chrome_trace, simulated_steps

        name = f"{config.recipe}, planned by {config.planner.name}"
        output.write_trace(timeline, chrome_trace([Process(name, simulated_steps(plans, settings))]))

    # The first line has what all steps have in common, the table a row for each step.
    first, parallel = plans[0], config.parallel
    ranks = f"{hdp_ranks(first.ranks, parallel.tp, parallel.pp)} x capacity {counted(first.capacity, 'token')}"
    read = f"{source(config)}, split at context={config.context}"
    head = f"planner {first.planner}, {ranks}, {first.mode} mode; {read}; hardware rates: {settings.costs.source}"
    rows = [
        {_SHORT.get(name, name): output.number(fact[name]) for name in PLAN_FACTS} | {"step": str(step)}
        for step, fact in enumerate(found, start=1)
    ]
    lines = [head, "", output.sections(["step"], _QUESTIONS, rows), "", _LEGEND, MODES[first.mode]]
    lines += _offload(job, found) if settings.offload else []

    # One table for all steps, by ring size, so that many steps still print little.
    degrees = np.concatenate([one.degrees[one.before == 0] for one in plans])
    sizes = np.concatenate([one.sequence_lengths for one in plans])
    rings = list[dict[str, str]]()
    for degree in np.unique(degrees).tolist():
        own = sizes[degrees == degree]
        fraction = own.sum() / sizes.sum()
        cells = [str(degree), f"{len(own):,}", f"{own.sum():,}", f"{fraction:.1%}", f"{own.max():,}"]
        rings.append(dict(zip(_RINGS, cells, strict=True)))
    lines += ["", output.sections(_RINGS[:1], {"Which sequences are split?": _RINGS[1:]}, rings)]
    # Warnings go to stderr, after everything that may fail, and into the JSON.
    say_toys(config, "model", "lengths", "rates")
    warnings = say_warnings(
        [
            *low_balance(config, float(np.mean([fact["balance"] for fact in found]))),
            *empty_capacity(config, settings.ranks, max(fact["largest_micro_batch"] for fact in found)),
            *small_corpus(config, corpus_tokens(config)),
        ]
    )
    answer = {"plan": found[0], "steps": found, "source": source(config), "for": planned_for(config)}
    answer["warnings"] = warnings
    output.emit(answer, output.fill("\n".join(lines)), as_json=json)


def _without_offload(plan: StepPlan, settings: PlanSettings) -> dict[str, Any] | None:
    """Return facts of the same step planned without offload; None if `plan` offloads nothing, or fits only with it."""
    from engine.errors import MemoryFitError
    from engine.planner.make import plan_step
    from engine.simulator.facts import facts

    if not plan.offload.any():
        return None
    plain = settings.without_offload()
    try:
        return dict(facts(plan_step(plan.sequence_lengths, plain), plain))
    except MemoryFitError:
        return None


def _offload(job: Job, found: list[dict[str, Any]]) -> list[str]:
    """Describe the step that offloads the most: how much goes to the host, and what would change without offload.

    `found` contains the facts (simulator/facts.py) of each step. If no step offloads, one line reports it.
    """
    from engine.config.units import format_bytes

    offloading = sum(fact["offloaded_micro_batches"] > 0 for fact in found)
    if not offloading:
        shorten = "the step" if len(found) == 1 else f"any of the {len(found)} steps"
        return [f"offload: allowed, but not used: it would not shorten {shorten}"]
    step, fact = max(enumerate(found, start=1), key=lambda numbered: numbered[1]["offloaded_share"])
    which = f" (of {offloading} steps with offload, the one with the most)" if offloading > 1 else ""
    devices = job.cluster.largest_node
    needs, has = fact["host_bytes"], job.config.cluster.host_memory
    memory = (
        f"host memory: at most {format_bytes(needs)} of {format_bytes(has)} per device, "
        f"{format_bytes(needs * devices)} of {format_bytes(has * devices)} per node"
    )
    fraction = fact["offloaded_micro_batches"] / fact["micro_batches"]
    saved = f"{fact['offloaded_share']:.1%} of all saved activations"
    lines = [f"offload in step {step}{which}: {fraction:.1%} of the micro-batches, {saved}; {memory}"]
    without = fact["without_offload"]
    if without is None:
        return [*lines, "without offload the step does not fit"]
    before, after = without["makespan_s"], fact["makespan_s"]
    changes = [
        f"fewest ranks for the longest sequence {without['least_ranks']:,} -> {fact['least_ranks']:,}",
        f"ring members in total {without['ring_ranks']:,} -> {fact['ring_ranks']:,}",
        f"ring bytes {format_bytes(without['ring_bytes'])} -> {format_bytes(fact['ring_bytes'])}",
        f"makespan_s {before:.3f} -> {after:.3f} ({before / after:.3f} times as fast)",
    ]
    return [*lines, f"without -> with offload: {'; '.join(changes)}"]
