"""`bytescale estimate-memory`: a rank's memory by item, without any GPU and without torch."""

from __future__ import annotations

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
    check_steps,
    loaded,
    plot_path,
    say_toys,
    whole_number,
    with_config,
)

if TYPE_CHECKING:
    from engine.job import Job

_TABLE = ("zero.stage", "offload.ratio", "recompute", "peak", "host", "fits")


def estimate_memory(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Find the largest capacity, the longest context and the fewest ranks.")
    ] = False,
    table: Annotated[bool, typer.Option("--table", help="Compare ZeRO stages, offload and recompute modes.")] = False,
    plan: Annotated[
        int | None,
        typer.Option(parser=whole_number, metavar="N", help="Estimate the largest micro-batch of N planned steps."),
    ] = None,
    plot: Plot = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Estimate a rank's memory by item. Shows whether it fits. Needs no GPU."""
    if plan is not None:
        check_steps(plan, "--plan")
    path = plot_path(plot)
    from engine.config.units import counted, format_bytes
    from engine.fit.check import fit_error
    from engine.fit.estimate import estimate, estimate_fullest, estimate_plans
    from engine.job import Job
    from engine.report.words import memory_rows, memory_unit, source

    quiet = plan is None  # an estimate without plans needs no lengths
    config = loaded(overrides, config_file) if quiet else loaded(overrides, config_file, output.say)
    job = Job(config)
    settings, error = job.settings, fit_error(job)
    if plan is None or error:  # a config that does not fit cannot be planned: its estimate shows why
        found = estimate(job)
    else:
        from engine.data.lengths import step_lengths
        from engine.planner.make import plan_step

        output.say_when_compiling()
        steps = step_lengths(config, plan, about_documents(with_config(overrides, config_file)))
        found = estimate_plans(job, (plan_step(lengths, settings) for lengths in steps))
    answer: dict[str, Any] = {"memory": found.as_json()} | ({} if plan is None else {"source": source(config)})

    # The estimate is that of the fullest device. The first line names its micro-batch, node and stage.
    tokens, offload = found.load.tokens, found.load.offload
    head = f"{config.model.name}, {counted(settings.ranks, 'rank')}, ZeRO-{config.zero.stage}, {config.dtype}, "
    head += f"recompute={config.recompute}; a micro-batch of {counted(tokens, 'token')}"
    head += f" on node {found.node}" if found.node else ""
    if settings.stages > 1:
        head += f", on stage {found.stage} of {settings.stages}, which needs the most"
    if plan is not None and error is None:
        head += f", the largest of {counted(plan, 'step')} of {source(config)}"
    if offload:
        head += f", {offload / 1e6:.0%} of the saved activations, except the last two layers', offloaded to the host"
    items = output.table(["per device", memory_unit(found.peak)[0], "of total"], memory_rows(found), right=True)
    text = [head, items]
    # With offload, a shard of one long sequence may have more tokens than `capacity`. The table above excludes that.
    fullest = estimate_fullest(job)
    if error is None and plan is None and fullest.load.tokens > tokens:
        answer["fullest"] = fullest.as_json()
        sizes = f"{format_bytes(fullest.peak)} on the device and {format_bytes(fullest.host)} on the host"
        text.append(f"with offload, up to {fullest.load.tokens:,} tokens of one long sequence fit on a rank: {sizes}")
    refused = error.problems[0].message if error else None
    # The page shows these sizes too, so they are searched once for both.
    if fit or path is not None:
        largest, fitting = _fit(job)
        if fit:
            answer["fit"] = largest | {"refused": refused}
            text += ["", *(f"{what:<36}{value}" for what, value in fitting)]
            if largest["capacity"] != largest["capacity_without_offload"]:
                text.append(
                    "with offload, these settings may use all host memory, and leave none for the copy of checkpoints"
                )
    if table:
        answer["table"], lines = _table(job)
        text += ["", *lines]
    if path is not None:
        from engine.report.memory_page import memory_page

        output.write_page(path, memory_page(job, found, fitting, refused).html())
    # A hint that the model is a toy would distract from the error.
    if error is None:
        say_toys(config, "model")
    output.emit(answer, output.fill("\n".join(text)), as_json=json, error=error)


def _fit(job: Job) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Find the largest capacity, the longest context and the fewest ranks that fit; return JSON, and pairs of text.

    In the JSON, `context_set` and `ranks_set` are overrides for any command, and None means that nothing fits. With a
    hostfile `ranks` is not searched, and also None.
    """
    from engine.config.units import counted
    from engine.fit.largest import largest_capacity, least_ranks, longest_context, named_ratio, of_ranks

    config, settings, ratio = job.config, job.settings, named_ratio(job.config)
    context = longest_context(settings, ratio) or None
    capacity = largest_capacity(settings, ratio) if context else None
    plain = largest_capacity(settings.without_offload()) or None
    ranks = None if config.cluster.hostfile else least_ranks(job)
    ranks_set = " ".join(f"{key}={n}" for key, n in of_ranks(job, ranks).items()) if ranks else None
    found = {
        "capacity": capacity,
        "capacity_without_offload": plain,
        "context": context,
        "ranks": ranks,
        "context_set": f"capacity={capacity} context={context}" if context else None,
        "ranks_set": ranks_set,
    }

    few = "" if config.context <= (context or 0) else f" with context={context or 0} or less"
    without = f"; without offload: {f'capacity={plain}' if plain else 'none'}" if plain != capacity else ""
    none = "not searched with a hostfile" if config.cluster.hostfile else "none fits"
    fewest = f"{ranks_set} ({counted(ranks, 'rank')})" if ranks else none
    return found, [
        ("largest capacity that fits", f"capacity={capacity}{few}{without}" if capacity else "none"),
        ("longest context for these ranks", str(found["context_set"] or "none")),
        (f"fewest ranks for context={config.context}", fewest),
    ]


def _table(job: Job) -> tuple[list[dict[str, Any]], list[str]]:
    """Compare ZeRO stages, offload and recompute modes; return the rows as JSON, and lines of text."""
    from engine.config.units import counted
    from engine.fit.suggestions import table
    from engine.report.words import memory_unit

    settings, rows = job.settings, table(job)
    unit, size = memory_unit(max((row["peak"] for row in rows), default=0))
    cells = []
    for row in rows:
        shown = row | {name: f"{row[name] / size:,.1f} {unit}" for name in ("peak", "host")}
        shown["fits"] = "yes" if row["fits"] else "no"
        cells.append([str(shown[name]) for name in _TABLE])
    alike = settings.least_capacity == settings.capacities.max()
    capacity = counted(settings.least_capacity, "token") if alike else "each rank's own capacity"
    return rows, [
        f"each row: memory for a micro-batch of {capacity}, if every token belongs to a ring",
        output.table(_TABLE, cells, right=True),
    ]
