"""The page of `profile-data`: the lengths of documents, and one step planned by each planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.config.schema import Config
from engine.config.units import counted
from engine.report import headline
from engine.report.charts import histogram_picture
from engine.report.page import Figure, Page, Table
from engine.report.plan_page import PERCENTILES
from engine.report.words import BALANCE, LENGTH_FACTS, MAKESPAN, NAMES, PLANNER_FACTS, SOURCE_FACTS, cell, short_tokens


def lengths_page(config: Config, data: Mapping[str, Any], planned: Sequence[Mapping[str, Any]]) -> Page:
    """Build the page from the facts of `profile-data --json`: `data`, and `planned`, a dict per planner."""
    # Numbers that come from a sample are estimates, and are marked as such.
    sources = data["sources"]
    sampled = data["read"]["share"] < 1
    about = "about " if sampled else ""
    documents, tokens, none = (sum(one[key] for one in sources) for key in ("samples", "tokens", "empty"))
    empty = f", and {counted(none, 'empty one')}" if none else ""
    sequences = f"{about}{counted(data['sequences'], 'sequence')} of up to {short_tokens(config.context)} tokens"
    head = [
        ("source", data["source"]),
        ("documents", f"{about}{documents:,}{empty}"),
        ("tokens", f"{about}{tokens:,}"),
        ("split at the context", sequences),
    ]
    marks = {name: data[name] for name in PERCENTILES}
    if data["fits"]:  # otherwise there is no capacity to suggest
        capacity = f"{short_tokens(data['suggested_capacity'])} tokens per rank: {data['reason']}"
        head.append(("suggested capacity", capacity))
        ring = f"{counted(data['suggested_ring_limit'], 'rank')} at that capacity"
        head.append(("ring of the longest sequence", ring))
        marks["suggested capacity"] = data["suggested_capacity"]

    caption = (
        "Lengths of documents before they are split at the context, as percentages of all documents and of all tokens. "
        "Each bucket includes the length at its right end. p50 is the median."
    )
    if sampled:
        caption += f" From a sample: {data['read']['share']:.2%} of the source was read."
    buckets = data["buckets"]
    picture = Figure.of("Lengths", caption, lambda size: histogram_picture(buckets, marks, "documents", size=size))

    # A single source has all its numbers in the head of the page, and planners can be compared only if the context
    # fits.
    tables = [Table("Lengths in tokens", [(name, f"{data[key]:,.0f}") for key, name in LENGTH_FACTS.items()])]
    if len(sources) > 1:
        each = [(one["name"], *(f"{one[key]:,}" for key in SOURCE_FACTS), f"{one['share']:.1%}") for one in sources]
        columns = ("source", *SOURCE_FACTS.values(), "of the mixture")
        tables.insert(0, Table("Sources", each, columns))
    if planned:
        rows = [(str(fact["planner"]), *(cell(fact, name) for name in PLANNER_FACTS)) for fact in planned]
        columns = ("planner", *(NAMES.get(name, name) for name in PLANNER_FACTS))
        tables.append(Table("One step at the suggested capacity", rows, columns, f"{MAKESPAN} {BALANCE}"))
    return Page(
        title=config.recipe,
        kind="a ByteScale data profile",
        headline=headline.of_lengths(data),
        head=head,
        figures=[picture],
        tables=tables,
        warning=None
        if data["fits"]
        else "The context does not fit in the memory of these ranks, whatever the capacity.",
    )
