"""`bytescale profile-data`: shows document lengths and suggests a capacity, without a GPU and without torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import (
    ConfigFile,
    Debug,
    Json,
    Overrides,
    Plot,
    about_documents,
    chosen,
    config_as_typed,
    load_with_weights,
    plot_path,
    say_warnings,
    whole_number,
    with_config,
)
from bytescale_cli.terminal import is_live
from engine.errors import ConfigError, MemoryFitError

if TYPE_CHECKING:
    from engine.job import Job
    from engine.planner.settings import PlanSettings

_QUESTIONS = {
    "How good is each planner's plan?": ["balance", "makespan_s"],
    "What does it split and send?": ["max_degree", "micro_batches", "ring_bytes"],
}
_BAR = 10  # characters of the longest bar of a histogram
_SECONDS = 5.0  # between two lines of progress
_LEGEND = """makespan: modelled time until the last rank finishes
balance: mean useful work of a rank / makespan, at most 1"""


def profile_data(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    sample: Annotated[
        int | None,
        typer.Option(
            parser=whole_number,
            metavar="N",
            help="Read or sample about N documents. Default: all, or a sample of a large source.",
        ),
    ] = None,
    cost: Annotated[
        bool, typer.Option("--cost", help="Also measure what packing each source costs a loader, on some blocks.")
    ] = False,
    plot: Plot = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show document lengths and suggest a capacity. Also compares the planners on one step."""
    if sample is not None and sample < 1:
        raise ConfigError(f"must be at least 1, not {sample}", key="--sample", hint="for example --sample 10000")
    path = plot_path(plot)
    from dataclasses import replace

    from engine.config.named import named
    from engine.config.sources import source_configs
    from engine.data.lengths import document_lengths, example_step, source_weights
    from engine.data.mixture import SCALE
    from engine.data.profile import describe, suggest
    from engine.data.sampled_costs import sampled_costs
    from engine.data.scale import is_without_recipe, planned_for, scaled
    from engine.data.scan import mixed
    from engine.fit.check import fit_error
    from engine.fit.largest import largest_capacity, named_ratio
    from engine.job import Job
    from engine.planner.checks import check_planner
    from engine.planner.make import plan_step
    from engine.planner.planners import PLANNERS
    from engine.report.words import source
    from engine.simulator.facts import facts
    from engine.simulator.hollow import low_balance, small_corpus

    with config_as_typed(config_file), _progress() as progress:
        given = chosen(with_config(overrides, config_file))
        say = about_documents(given)
        # Without a recipe, the longest document determines one. A recipe without documents has other lengths, which a
        # line reports, because a user may expect those of documents.
        if is_without_recipe(given):
            config, sources = scaled(given, sample, progress, say)
        else:
            config = load_with_weights(given, say)
            if named(given) == (None, None):
                yours = "bytescale profile-data data.path=FILE (docs/data.md)"
                of = f"{source(config)} of recipe={config.recipe}"
                output.say(f"no documents are named: these are {of}; for other documents: {yours}")
            sources = document_lengths(config, sample, progress, say)
        if cost and config.lengths.name != "data":
            hint = "name them: bytescale profile-data data.path=FILE --cost"
            raise ConfigError("needs documents, because lengths alone are not packed", key="--cost", hint=hint)
        costs = sampled_costs(source_configs(config.data), config.run.seed, progress) if cost else {}
    output.say_when_compiling()
    # The suggestion is for all sources together, in the proportions of the mixture.
    job = Job(config)
    settings, weights = job.settings, source_weights(config)
    found = mixed(sources, weights)
    largest = largest_capacity(settings, named_ratio(config))
    suggested = suggest(found, job, largest)
    data = describe(found, config.context) | {
        "source": source(config),
        "for": planned_for(config),
        "sources": [
            {"name": name, "share": weights.get(name, 0) / SCALE}
            | describe(one, config.context)
            | ({"cost": costs[name]._asdict()} if name in costs else {})
            for name, one in sources.items()
        ],
        "largest_capacity": largest,
        "suggested_capacity": suggested.capacity,
        "suggested_ring_limit": suggested.ring_limit,
        "reason": suggested.reason,
        "fits": suggested.fits,
    }
    planned: list[dict[str, Any]] = []
    error = fit_error(job)
    if suggested.fits:  # otherwise the context fits at no capacity, and no plan exists
        # All planners plan the same step, at the suggested capacity instead of that of the config.
        step = example_step(config, found)
        by_planner: list[PlanSettings] = []
        for name in PLANNERS:
            with suppress(ConfigError):  # it needs more peers than planner.max_peers, unlike the planner of the config
                check_planner(settings.by(name))
                by_planner.append(replace(settings, capacity=suggested.capacity).by(name))
        with suppress(MemoryFitError):  # a node with less memory may be too small; the error below reports it
            planned = [dict(facts(plan_step(step, own), own)) for own in by_planner]
    if path is not None:
        from engine.report.lengths_page import lengths_page

        output.write_page(path, lengths_page(config, data, planned).html())
    text = f"{_lengths(data)}\n\n{_advice(data, planned, job)}"
    # Only the planner of the config may cause a warning: the others are shown for comparison.
    own = [fact["balance"] for fact in planned if fact["planner"] == config.planner.name]
    # The size of the corpus is known only where documents or a file of lengths were read: a mix of lengths has no end.
    tokens = sum(one["tokens"] for one in data["sources"]) if config.lengths.name in ("data", "file") else None
    low = [warning for balance in own for warning in low_balance(config, balance)]
    warnings = say_warnings([*low, *small_corpus(config, tokens)])
    answer = {"data": data, "planners": planned, "warnings": warnings}
    output.emit(answer, output.fill(text), as_json=json, error=error)


def _lengths(data: dict[str, Any]) -> str:
    """Format counts, percentiles, and a histogram: a row per bucket with its documents, its tokens and bars.

    Several sources have a row each, and the percentiles and the histogram are of their mixture.
    """
    from engine.config.units import counted
    from engine.report.words import SOURCE_FACTS

    sources: list[dict[str, Any]] = data["sources"]
    about = "about " if data["read"]["share"] < 1 else ""
    documents, tokens, empty, dropped = (
        sum(one[key] for one in sources) for key in ("samples", "tokens", "empty", "dropped")
    )
    text = f"{data['source']}: {about}{counted(documents, 'document')}, {about}{counted(tokens, 'token')}"
    if empty:
        text += f"; {about}{empty:,} more {'is' if empty == 1 else 'are'} empty"
    if dropped:
        text += f"; {about}{dropped:,} more {'is' if dropped == 1 else 'are'} left out by data.transform"
    if about:
        sample, share = counted(data["read"]["samples"], "document"), data["read"]["share"]
        text += (
            f"\na sample chosen by run.seed was read: {sample}, {share:.2%} of the source; "
            "counts are extrapolated, and longer documents may exist"
        )
    if len(sources) > 1:
        rows = [[one["name"], *(f"{one[key]:,}" for key in SOURCE_FACTS), f"{one['share']:.1%}"] for one in sources]
        table = output.table(["source", *SOURCE_FACTS.values(), "of the mixture"], rows, right=True)
        text += f"\n\n{table}\nmixture: {counted(data['samples'], 'document')} have {data['tokens']:,} tokens"
    if any("cost" in one for one in sources):
        text += f"\n\n{_costs(sources)}"
    return f"{text}\n{length_table(data)}"


def _costs(sources: list[dict[str, Any]]) -> str:
    """Format what packing costs a loader, a row per source; token files are packed already."""
    from engine.config.units import format_bytes

    rows = []
    for one in sources:
        if (cost := one.get("cost")) is None:
            rows.append([one["name"], *["-"] * 6])
            continue
        seconds, blocks = cost["seconds"], cost["blocks"]
        each = [seconds / blocks, 1e3 * seconds / max(1, cost["documents"]), 1e6 * seconds / max(1, cost["bytes"])]
        sizes = [format_bytes(cost["bytes"] // blocks), f"{cost['tokens'] // blocks:,}"]
        rows.append([one["name"], *sizes, *(f"{value:.3g}" for value in each), format_bytes(cost["memory"])])
    columns = ["packing", "bytes/block", "tokens/block", "s/block", "ms/document", "s/MB", "memory of a loader"]
    return f"{output.table(columns, rows, right=True)}\ns: seconds of processor time"


def length_table(data: Mapping[str, Any]) -> str:
    """Format percentiles, and a row per bucket of a histogram (engine/data/profile.py)."""
    from engine.config.units import format_count
    from engine.report.words import LENGTH_FACTS

    text = "  ".join(f"{name} {data[key]:,.0f}" for key, name in LENGTH_FACTS.items())
    buckets: list[dict[str, int]] = data["buckets"]
    columns = [[format_count(bucket["upto"]) for bucket in buckets]]
    for kind in ("samples", "tokens"):
        counts = [bucket[kind] for bucket in buckets]
        columns.append([f"{count:,}" for count in counts])
        columns.append([f"{count / sum(counts):.1%}" for count in counts])
        columns.append([("#" * round(_BAR * count / max(counts))).ljust(_BAR, ".") for count in counts])
    rows = [list(row) for row in zip(*columns, strict=True)]
    table = output.table(["up to", "documents", "of all", "", "tokens", "of all", ""], rows, right=True).rstrip("\n")
    return f"{text}\n\n{table}"


def _advice(data: dict[str, Any], planned: list[dict[str, Any]], job: Job) -> str:
    """Format the suggested capacity, and a table that compares each planner's plan of one step at that capacity.

    If no capacity is suggested, the text explains why nothing fits. There is no table if `planned` is empty.
    """
    from engine.config.units import counted, format_count
    from engine.report.words import NAMES, PLANNER_FACTS, cell

    config, settings = job.config, job.settings
    about = "about " if data["read"]["share"] < 1 else ""
    cut = f"split at context={format_count(config.context)}: {about}{counted(data['sequences'], 'sequence')}\n"
    capacity, largest = (format_count(data[name]) for name in ("suggested_capacity", "largest_capacity"))
    fits = f"capacity={format_count(config.capacity)} is set; at most capacity={largest} fits"
    if not data["largest_capacity"]:
        return f"{cut}no capacity fits: the model states leave no memory for even one token"
    if not data["fits"]:
        each = f"each of {counted(settings.ranks, 'rank')} would have to hold {capacity} tokens"
        return f"{cut}the context does not fit: {each}; {fits}"
    ring = f"{data['suggested_ring_limit']:,} of {counted(settings.ranks, 'rank')}"
    advice = f"{cut}suggested capacity={capacity} ({data['reason']}); {fits}\n"
    advice += f"with the longest sequence on {ring}, no other rank has to wait for it"
    if not planned:  # the context does not fit a node with less memory
        return advice
    rows = [{NAMES.get(name, name): cell(fact, name) for name in ("planner", *PLANNER_FACTS)} for fact in planned]
    questions = {question: [NAMES.get(name, name) for name in facts] for question, facts in _QUESTIONS.items()}
    tables = output.sections(["planner"], questions, rows)
    step = f"{counted(planned[0]['sequences'], 'sequence')}, {counted(planned[0]['tokens'], 'token')}"
    return f"{advice}\n\none step of {step}, at that capacity:\n\n{tables}\n\n{_LEGEND}"


@contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """Yield a function that shows the fraction done, 0 to 1: a bar on a terminal, else a line every 5 seconds."""
    if is_live(sys.stderr):
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("reading", total=1.0)
            yield lambda fraction: bar.update(task, completed=fraction)
        return
    last = time.monotonic()

    def print_sometimes(fraction: float) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS:
            last = time.monotonic()
            output.say(f"read {fraction:.0%} of the documents")

    yield print_sometimes
