"""The page of a source's lengths: how long documents are, and what each planner makes of one step of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.config.schema import Config
from engine.config.units import counted
from engine.report.histogram import histogram_picture
from engine.report.page import Figure, Page, Table
from engine.report.plan_page import PERCENTILES
from engine.report.words import NAMES, Pair, cell, short_tokens

_PLANNED = ("balance", "max_degree", "micro_batches", "ring_bytes", "makespan_s")


def lengths_page(config: Config, data: Mapping[str, Any], planned: Sequence[Mapping[str, Any]]) -> Page:
    """Return the page of what `profile-data --json` says as `data` and `planners`."""
    return Page(
        title=config.recipe,
        kind="lengths for ByteScale",
        head=_head(config, data),
        figures=[_histogram(data)],
        tables=[_numbers(data), *([_planners(planned)] if planned else [])],
        warning=None if data["fits"] else "The context does not fit the memory of these ranks at any capacity.",
    )


def _head(config: Config, data: Mapping[str, Any]) -> list[Pair]:
    about = "about " if data["read"]["share"] < 1 else ""
    empty = f", and {counted(data['empty'], 'empty one')}" if data["empty"] else ""
    pairs = [
        ("source", data["source"]),
        ("documents", f"{about}{data['samples']:,}{empty}"),
        ("tokens", f"{about}{data['tokens']:,}"),
        (
            "cut at the context",
            f"{about}{counted(data['sequences'], 'sequence')} of up to {short_tokens(config.context)} tokens",
        ),
    ]
    if not data["fits"]:
        return pairs
    capacity = f"{short_tokens(data['suggested_capacity'])} tokens a rank: {data['reason']}"
    ring = f"{counted(data['suggested_ring_limit'], 'rank')} at that capacity"
    return [*pairs, ("suggested capacity", capacity), ("largest ring", ring)]


def _histogram(data: Mapping[str, Any]) -> Figure:
    marks = {name: data[name] for name in PERCENTILES}
    if data["fits"]:
        marks["suggested capacity"] = data["suggested_capacity"]
    caption = (
        "The documents by length before they are cut, each bucket up to the length at its right end, by their number "
        "and by their tokens. Half of the documents are no longer than p50."
    )
    if data["read"]["share"] < 1:
        caption += f" From a sample: {data['read']['share']:.2%} of the source was read."
    picture = data["buckets"], marks, "documents"
    return Figure.of("Lengths", caption, lambda size: histogram_picture(*picture, size=size))


def _numbers(data: Mapping[str, Any]) -> Table:
    names = {"mean": "mean", "p50": "p50", "p90": "p90", "p99": "p99", "p999": "p99.9", "max": "longest"}
    return Table("Lengths in tokens", [(name, f"{data[key]:,.0f}") for key, name in names.items()])


def _planners(planned: Sequence[Mapping[str, Any]]) -> Table:
    rows = [(str(fact["planner"]), *(cell(fact, name) for name in _PLANNED)) for fact in planned]
    return Table("One step at the suggested capacity", rows, ("planner", *(NAMES.get(name, name) for name in _PLANNED)))
