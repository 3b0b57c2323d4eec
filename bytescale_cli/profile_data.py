"""`bytescale profile-data`: how long documents are, and what that asks of a cluster. Without any GPU and torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, Overrides, Plot, plot_path, whole_number
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.config.schema import Config
    from engine.data.profile import Suggestion
    from engine.planner.plan import Ints
    from engine.planner.settings import PlanSettings

_BAR = 10  # characters of the longest bar of a histogram
_SECONDS = 5.0  # between two lines of progress
_PLANNED = ("planner", "balance", "largest ring", "micro-batches", "ring GiB", "makespan s")


def profile_data(
    overrides: Overrides = None,
    sample: Annotated[
        int | None,
        typer.Option(
            parser=whole_number,
            metavar="N",
            help="Read or draw about N documents. Else all, or of a large source a part.",
        ),
    ] = None,
    plot: Plot = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show how long documents are, and a capacity for them. Also what each planner makes of them."""
    if sample is not None and sample < 1:
        raise ConfigError(f"must be at least 1, not {sample}", key="--sample", hint="for example --sample 10000")
    path = plot_path(plot)
    from dataclasses import replace

    from engine.config.load import load
    from engine.data.profile import a_step, describe, documents, suggest
    from engine.planner.settings import PlanSettings
    from engine.report.words import source

    config = load(overrides or [])
    output.say_when_compiling()
    settings = PlanSettings.of(config)
    with _progress() as progress:
        found = documents(config, sample, progress)
    suggested = suggest(found.lengths, config, settings)
    data = describe(found, config.context) | {"source": source(config)} | _suggested(suggested)
    planned = _planned(a_step(config, found), replace(settings, capacity=suggested.capacity)) if suggested.fits else []
    if path is not None:
        from engine.report.lengths_page import lengths_page

        output.write_page(path, lengths_page(config, data, planned).html())
    text = "\n\n".join([_head(data), _histogram(data["buckets"]), _advice(data, config, settings), _planners(planned)])
    output.emit({"data": data, "planners": planned}, text, as_json=json)


def _suggested(suggested: Suggestion) -> dict[str, Any]:
    return {
        "suggested_capacity": suggested.capacity,
        "suggested_ring_limit": suggested.ring_limit,
        "reason": suggested.reason,
        "fits": suggested.fits,
    }


def _planned(lengths: Ints, settings: PlanSettings) -> list[dict[str, Any]]:
    """Return the facts of one verified plan by each planner."""
    from engine.planner.make import PLANNERS, plan_step
    from engine.simulator.facts import facts

    return [dict(facts(plan_step(lengths, settings.by(name)), settings.by(name))) for name in PLANNERS]


def _head(data: dict[str, Any]) -> str:
    from engine.config.units import counted

    about = "about " if data["read"]["share"] < 1 else ""
    documents, tokens = counted(data["samples"], "document"), counted(data["tokens"], "token")
    text = f"{data['source']}: {about}{documents}, {about}{tokens}"
    if data["empty"]:
        text += f"; {about}{data['empty']:,} more {'is' if data['empty'] == 1 else 'are'} empty"
    if about:
        sample, share = counted(data["read"]["samples"], "document"), data["read"]["share"]
        text += (
            f"\nrun.seed chose a sample to read: {sample} or {share:.2%} of the source; "
            "counts are extrapolated, and longer documents may exist"
        )
    names = {"mean": "mean", "p50": "p50", "p90": "p90", "p99": "p99", "p999": "p99.9", "max": "longest"}
    return text + "\n" + "  ".join(f"{name} {data[key]:,.0f}" for key, name in names.items())


def _histogram(buckets: list[dict[str, int]]) -> str:
    """Return a line a bucket: its share of documents and of tokens, and bars against the largest share."""
    from engine.config.units import format_count

    columns = [[format_count(bucket["upto"]) for bucket in buckets]]
    for kind in ("samples", "tokens"):
        counts = [bucket[kind] for bucket in buckets]
        columns.append([f"{count:,}" for count in counts])
        columns.append([f"{count / sum(counts):.1%}" for count in counts])
        columns.append([("#" * round(_BAR * count / max(counts))).ljust(_BAR, ".") for count in counts])
    rows = [list(row) for row in zip(*columns, strict=True)]
    return output.table(["up to", "documents", "share", "", "tokens", "share", ""], rows, right=True).rstrip("\n")


def _advice(data: dict[str, Any], config: Config, settings: PlanSettings) -> str:
    from engine.config.units import counted, format_count

    about = "about " if data["read"]["share"] < 1 else ""
    cut = f"cut at context={format_count(config.context)}: {about}{counted(data['sequences'], 'sequence')}\n"
    capacity = format_count(data["suggested_capacity"])
    if not data["fits"]:
        ranks = f"each of {counted(settings.ranks, 'rank')}"
        held = f"{ranks} would have to hold {capacity} tokens, more than its memory allows"
        return f"{cut}the context does not fit: {held}"
    return (
        f"{cut}suggested capacity={capacity} ({data['reason']}; the recipe has {format_count(config.capacity)})\n"
        f"largest ring at that capacity: {data['suggested_ring_limit']:,} of {counted(settings.ranks, 'rank')}"
    )


def _planners(planned: list[dict[str, Any]]) -> str:
    """Return a line a planner: what it makes of one step at the suggested capacity."""
    if not planned:
        return ""
    from engine.config.units import counted

    rows = [
        [
            fact["planner"],
            f"{fact['balance']:.3f}",
            f"{fact['max_degree']:,}",
            f"{fact['micro_batches']:,}",
            f"{fact['ring_bytes'] / 2**30:,.1f}",
            f"{fact['makespan_s']:,.3f}",
        ]
        for fact in planned
    ]
    step = f"{counted(planned[0]['sequences'], 'sequence')}, {counted(planned[0]['tokens'], 'token')}"
    head = f"one step of {step}, at that capacity:"
    return f"{head}\n{output.table(_PLANNED, rows, right=True)}"


@contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """Give a function that takes the share that is done: a bar on a terminal, else a line from time to time."""
    if sys.stderr.isatty():
        with _live() as progress:
            yield progress
        return
    told = time.monotonic()

    def tell(share: float) -> None:
        nonlocal told
        if time.monotonic() - told >= _SECONDS:
            told = time.monotonic()
            output.say(f"read {share:.0%} of the documents")

    yield tell


@contextmanager
def _live() -> Iterator[Callable[[float], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=1.0)
        yield lambda share: bar.update(task, completed=share)
