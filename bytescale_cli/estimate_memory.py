"""`bytescale estimate-memory`: a rank's memory by item, without any GPU and without torch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, Overrides, Plot, check_steps, plot_path, whole_number
from engine.errors import ConfigError, MemoryFitError

if TYPE_CHECKING:
    from engine.config.schema import Config
    from engine.planner.estimate import Estimate
    from engine.planner.settings import PlanSettings

_TABLE = ("zero.stage", "offload.ratio", "recompute", "peak", "host", "fits")


def estimate_memory(
    overrides: Overrides = None,
    fit: Annotated[bool, typer.Option("--fit", help="Search what fits: capacity, context, ranks.")] = False,
    table: Annotated[bool, typer.Option("--table", help="Compare ZeRO stages, offload and recompute modes.")] = False,
    plan: Annotated[
        int | None,
        typer.Option(parser=whole_number, metavar="N", help="Take the fullest micro-batch of N planned steps."),
    ] = None,
    plot: Plot = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Estimate a rank's memory by item, without any GPU. Says what fits."""
    if plan is not None:
        check_steps(plan, "--plan")
    path = plot_path(plot)
    from engine.config.load import load
    from engine.planner.estimate import estimate
    from engine.planner.settings import PlanSettings
    from engine.planner.ways import ways_out

    config = load(overrides or [], refuses=not fit)
    settings = PlanSettings.of(config, refuses=False)
    with nullcontext() if fit else ways_out(config):
        refused = _refused(config, settings, fit)
        found = _planned(config, settings, plan) if plan else estimate(config, settings)
    told: dict[str, Any] = {"memory": found.as_json()}
    text = [_head(config, settings, found), _items(found)]
    if fit:
        told["fit"] = _fit(config, settings, refused)
        text += ["", *_fit_lines(config, told["fit"])]
    if table:
        told["table"], drawn = _table(config)
        text += ["", f"each of a micro-batch of the capacity, {_capacity(settings)}", drawn]
    if path is not None:
        from engine.report.memory_page import memory_page

        output.write_page(path, memory_page(config, settings, found).html())
    if found.fits:
        output.emit(told, "\n".join(text), as_json=json)
    else:
        _refuse(config, settings, found, told, "" if json else "\n".join(text))


def _refused(config: Config, settings: PlanSettings, fit: bool) -> str | None:
    """Return why the ratio or the context cannot be planned, None if they can; raise it unless `fit` asks what can.

    Ranks that hold nothing beside the model states are what the estimate shows.
    """
    from engine.config.checks import context_problem
    from engine.planner.settings import check_host

    try:
        if (problem := context_problem(config, settings.ranks)) is not None:
            raise ConfigError.of([problem])
        check_host(config, settings.costs)
        if settings.least_capacity:
            settings.check_longest(config.context)
    except (ConfigError, MemoryFitError) as error:
        if not fit:
            raise
        return error.problems[0].message
    return None


def _planned(config: Config, settings: PlanSettings, steps: int) -> Estimate:
    from engine.data.lengths import step_lengths
    from engine.planner.estimate import of_plans
    from engine.planner.make import plan_step

    output.say_when_compiling()
    return of_plans(config, settings, (plan_step(lengths, settings) for lengths in step_lengths(config, steps)))


def _refuse(config: Config, settings: PlanSettings, found: Estimate, told: dict[str, Any], text: str) -> None:
    """Show what was found, and raise what does not fit with the ways out."""
    from engine.planner.ways import ways

    if text:
        output.show(text)
    ways_out = ways(config, settings)
    error = _refusal(config, found, "; or ".join(map(str, ways_out)))
    error.found = told | {"ways": [way.as_json() for way in ways_out]}
    raise error


def _refusal(config: Config, found: Estimate, ways: str) -> MemoryFitError:
    from engine.config.units import format_apart
    from engine.planner.settings import NODE_HOLDS_NOTHING

    places = {"device": (found.peak, found.device_total), "host": (found.host, found.host_total)}
    short = {place: format_apart(need, has) for place, (need, has) in places.items() if need > has}
    needs = " and ".join(f"{need} of its {place}, which has {has} for it" for place, (need, has) in short.items())
    message = f"a rank of node {found.node} needs {needs}" if found.node else f"a rank needs {needs}"
    if "device" in short and found.device_total != config.cluster.device_memory:  # its node says so
        return MemoryFitError(message, key="cluster.hostfile", hint=ways or NODE_HOLDS_NOTHING)
    key, other = f"cluster.{next(iter(short))}_memory", "a smaller model, or more and larger devices"
    return MemoryFitError(message, key=key, hint=ways or other)


def _head(config: Config, settings: PlanSettings, found: Estimate) -> str:
    from engine.config.units import counted

    load, node = found.load, f" of node {found.node}" if found.node else ""
    away = f", {load.offload / 1e6:.0%} of what the middle layers save on the host" if load.offload else ""
    sharded = f"{config.model.name}, {counted(settings.ranks, 'rank')}, ZeRO-{config.zero.stage}, {config.dtype}"
    return f"{sharded}, recompute={config.recompute}; a micro-batch of {counted(load.tokens, 'token')}{node}{away}"


def _items(found: Estimate) -> str:
    from engine.report.words import memory_rows, memory_unit

    return output.table(["a device holds", memory_unit(found.peak)[0], "share"], memory_rows(found), right=True)


def _fit(config: Config, settings: PlanSettings, refused: str | None) -> dict[str, Any]:
    """Return what fits, and as `set` keys that can be given to any command; None for what does not fit at all."""
    from engine.planner.fit import largest_capacity, least_ranks, longest_context, named, of_ranks

    ratio = named(config)
    context = longest_context(settings, ratio) or None
    capacity = largest_capacity(settings, ratio) if context else None
    ranks = None if config.cluster.hostfile else least_ranks(config, settings)
    return {
        "capacity": capacity,
        "context": context,
        "ranks": ranks,
        "context_set": f"capacity={capacity} context={context}" if context else None,
        "ranks_set": " ".join(f"{key}={n}" for key, n in of_ranks(config, settings, ranks).items()) if ranks else None,
        "refused": refused,
    }


def _fit_lines(config: Config, fit: dict[str, Any]) -> list[str]:
    from engine.config.units import counted

    capacity, context = fit["capacity"], fit["context"] or 0
    few = "" if config.context <= context else f" with context={context} or less"
    none = "not searched with a hostfile" if config.cluster.hostfile else "no number of them"
    ranks = f"{fit['ranks_set']} ({counted(fit['ranks'], 'rank')})" if fit["ranks"] else none
    return [
        f"largest capacity that fits          {f'capacity={capacity}{few}' if capacity else 'none'}",
        f"longest context for these ranks     {fit['context_set'] or 'none'}",
        f"least ranks for context={config.context:<12}{ranks}",
        *([f"as it is, {fit['refused']}"] if fit["refused"] else []),
    ]


def _table(config: Config) -> tuple[list[dict[str, Any]], str]:
    from engine.planner.ways import table
    from engine.report.words import memory_unit

    rows = table(config)
    unit = memory_unit(max((row["peak"] for row in rows), default=0))
    return rows, output.table(_TABLE, [[_cell(row[name], name, unit) for name in _TABLE] for row in rows], right=True)


def _capacity(settings: PlanSettings) -> str:
    from engine.config.units import counted

    mixed = settings.least_capacity != settings.capacities.max()
    return "of each rank's own where memory differs" if mixed else counted(settings.least_capacity, "token")


def _cell(value: Any, name: str, unit: tuple[str, int]) -> str:
    if name in ("peak", "host"):
        return f"{value / unit[1]:,.1f} {unit[0]}"
    return ("yes" if value else "no") if name == "fits" else f"{value}"
