"""`bytescale estimate-memory`: a rank's memory by item, without any GPU and without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, Overrides, Plot, plot_path, whole_number
from engine.errors import ConfigError, MemoryFitError

if TYPE_CHECKING:
    from engine.config.schema import Config
    from engine.planner.estimate import Estimate
    from engine.planner.memory import Load
    from engine.planner.settings import PlanSettings
    from engine.planner.ways import Way

_GIB = 2**30
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
    if plan is not None and plan < 1:
        raise ConfigError(f"must be at least 1, not {plan}", key="--plan", hint="for example --plan 3")
    path = plot_path(plot)
    from engine.config.load import load
    from engine.planner.estimate import estimate
    from engine.planner.settings import PlanSettings

    config = load(overrides or [])
    settings = PlanSettings.of(config, refuses=False)
    found = estimate(config, settings, _planned(config, settings, plan) if plan else None)
    told: dict[str, Any] = {"memory": found.as_json()}
    text = [_head(config, settings, found.load), _items(found)]
    if fit:
        told["fit"] = _fit(config, settings)
        text += ["", *_fit_lines(config, told["fit"])]
    if table:
        told["table"], drawn = _table(config)
        text += ["", drawn]
    if path is not None:
        from engine.report.memory_page import memory_page

        output.write_page(path, memory_page(config, settings, found).html())
    if found.fits:
        output.emit(told, "\n".join(text), as_json=json)
    else:
        _refuse(config, settings, found, told, "" if json else "\n".join(text))


def _planned(config: Config, settings: PlanSettings, steps: int) -> Load:
    from engine.data.lengths import step_lengths
    from engine.planner.estimate import of_plans
    from engine.planner.make import plan_step

    output.say_when_compiling()
    return of_plans((plan_step(lengths, settings) for lengths in step_lengths(config, steps)), settings.costs)


def _refuse(config: Config, settings: PlanSettings, found: Estimate, told: dict[str, Any], text: str) -> None:
    """Show what was found, and raise what does not fit with the ways out."""
    from engine.planner.ways import ways

    if text:
        output.show(text)
    ways_out = ways(config, settings)
    raise _refusal(found, ways_out, told | {"ways": [way.as_json() for way in ways_out]})


def _refusal(found: Estimate, ways: list[Way], told: dict[str, Any]) -> MemoryFitError:
    need, has = (found.peak, found.device_total) if found.peak > found.device_total else (found.host, found.host_total)
    place = "device" if found.peak > found.device_total else "host"
    hint = "; or ".join(map(str, ways)) or "a smaller model, or more and larger devices"
    message = f"a rank needs {need / _GIB:.1f} GiB of its {place}, which has {has / _GIB:.1f} GiB for it"
    error = MemoryFitError(message, key=f"cluster.{place}_memory", hint=hint)
    error.found = told
    return error


def _head(config: Config, settings: PlanSettings, load: Load) -> str:
    from engine.config.units import counted

    away = f", {load.offload / 1e6:.0%} of what the middle layers save on the host" if load.offload else ""
    sharded = f"{config.model.name}, {counted(settings.ranks, 'rank')}, ZeRO-{config.zero.stage}, {config.dtype}"
    return f"{sharded}, recompute={config.recompute}; a micro-batch of {counted(load.tokens, 'token')}{away}"


def _items(found: Estimate) -> str:
    from engine.report.words import memory_rows

    return output.table(["a device holds", "GiB", "share"], memory_rows(found), right=True)


def _fit(config: Config, settings: PlanSettings) -> dict[str, int | None]:
    from engine.planner.fit import largest_capacity, least_ranks

    capacity = largest_capacity(settings)
    return {
        "capacity": capacity,
        "context": capacity * settings.ranks,
        "ranks": least_ranks(config, settings) if config.cluster.hostfile is None else None,
    }


def _fit_lines(config: Config, fit: dict[str, int | None]) -> list[str]:
    from engine.config.units import counted

    ranks = "no number of them" if fit["ranks"] is None else counted(fit["ranks"], "rank")
    return [
        f"largest capacity that fits          capacity={fit['capacity']}",
        f"longest context for these ranks     context={fit['context']}",
        f"least ranks for context={config.context:<12}{ranks}",
    ]


def _table(config: Config) -> tuple[list[dict[str, Any]], str]:
    from engine.planner.ways import table

    rows = table(config)
    return rows, output.table(_TABLE, [[_cell(row, name) for name in _TABLE] for row in rows], right=True)


def _cell(row: dict[str, Any], name: str) -> str:
    if name in ("peak", "host"):
        return f"{row[name] / _GIB:.1f} GiB"
    return ("yes" if row[name] else "no") if name == "fits" else f"{row[name]}"
