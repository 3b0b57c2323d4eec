"""`bytescale simulate`: runs plans of several planners on a modelled cluster, without any GPU and without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, Overrides, Plot, check_steps, plot_path, whole_number
from engine.errors import BytescaleError, ConfigError, ExitCode, Problem

Run = dict[str, Any]

if TYPE_CHECKING:
    from engine.config.schema import Config

    Point = tuple[Config, list[str]]  # of a sweep, with its overrides
    Found = tuple[Config, list[Run]]

_PLANNERS = "static,naive,balanced,adaptive"
_OFFLOAD = "offload.ratio="
_SHOWN = ("step_s", "tokens_per_s", "speedup", "compute_s", "exposed_comm_s", "bubble", "mfu")
_LEGEND = (
    "speedup: over static; exposed_comm_s: mean wait of a rank for transfers alone; bubble: share of the step in which "
    "a rank\nneither computes nor waits for transfers; mfu: model FLOPs over the peak of all devices"
)
_HOST = ("host_bytes", "host_node_bytes")
_MORE = {
    "offload_gain": "offload_gain: over the first offload.ratio of the sweep",
    "host_bytes": "host_bytes: most on the host of a device at once, host_node_bytes: of a whole node, at most",
}


def simulate(
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Steps of which the mean is taken.")] = 1,
    planners: Annotated[
        str, typer.Option(metavar="A,B", help="Which planners; speed-ups are against static.")
    ] = _PLANNERS,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B", help="Values to run one after the other, e.g. context=256K,2M; may be repeated."
        ),
    ] = None,
    plot: Plot = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare planners on a modelled cluster. Shows step time, tokens a second, bubbles, speed-up."""
    check_steps(steps, "--steps")
    swept = dict(map(_values, sweep or []))
    if len(swept) < len(sweep or []):
        raise ConfigError("a key is swept twice", key="--sweep", hint="give all its values at once: KEY=A,B,C")
    names = _names(swept.pop("planner", planners.split(",")))
    path = plot_path(plot)
    points = list(_points(overrides or [], swept))  # all mistakes come first
    output.say_when_compiling()
    found, failures = _found(points, names, steps)
    runs = [run for _, of_point in found for run in of_point]
    _compare_offload(runs, swept.get("offload.ratio", [])[:1])
    if path is not None and found:
        _write_page(path, found[0][0], runs)
    if any(config.offload.ratio != 0.0 for config, _ in found) and {"naive", "balanced"} & set(names):
        output.say(
            "naive and balanced offload as published, by equation 3; offload.ratio=0 compares without (docs/paper.md)"
        )
    if failures:
        _refuse(failures, runs, json)
    output.emit({"runs": runs}, _text(runs), as_json=json)


def _names(names: list[str]) -> list[str]:
    """Return the planners that are asked for, each once; static always, since speed-ups are against it."""
    unknown = [name for name in names if name not in _PLANNERS.split(",")]
    if unknown:
        raise ConfigError(f"there is no planner {unknown[0]!r}", key="--planners", hint=f"one or more of {_PLANNERS}")
    return list(dict.fromkeys(["static", *names]))


def _values(text: str) -> tuple[str, list[str]]:
    """Return the key and the values of one `--sweep`."""
    key, _, values = text.partition("=")
    if not key or not all(values.split(",")):
        raise ConfigError(f"{text!r} is not KEY=A,B", key="--sweep", hint="for example --sweep context=256K,2M")
    return key, values.split(",")


def _points(overrides: list[str], swept: dict[str, list[str]]) -> Iterator[Point]:
    """Yield the config of each combination of the swept values, with the overrides that make it."""
    from itertools import product

    from engine.config.load import load

    for chosen in product(*swept.values()):
        extra = [f"{key}={value}" for key, value in zip(swept, chosen, strict=True)]
        try:
            yield load([*overrides, *extra]), extra
        except ConfigError as error:
            raise _in_run(error, extra) from error


def _found(points: list[Point], names: list[str], steps: int) -> tuple[list[Found], list[BytescaleError]]:
    """Return the runs of each point of a sweep, and what went wrong with the others: one does not stop the rest."""
    found, failures = [], []
    for config, extra in points:
        try:
            found.append((config, _runs(config, names, steps, extra)))
        except BytescaleError as error:
            if not extra or error.code == ExitCode.BUG:
                raise
            failures.append(_in_run(error, extra))
    return found, failures


def _in_run(error: BytescaleError, extra: list[str]) -> BytescaleError:
    """Return the error with the values of the sweep that it happened with."""
    where = f" (in the run with {' '.join(extra)})" if extra else ""
    return error.of([Problem(f"{one.message}{where}", one.key, one.hint) for one in error.problems])


def _refuse(failures: list[BytescaleError], runs: list[Run], json: bool) -> None:
    """Show the runs that there are, and raise what went wrong with the others; the first one's exit code counts."""
    if runs and not json:
        output.show(_text(runs))
    error = failures[0].of([problem for failure in failures for problem in failure.problems])
    error.found = {"runs": runs}
    raise error


def _runs(config: Config, names: list[str], steps: int, extra: list[str]) -> list[Run]:
    """Return what the steps of one config come to under each planner: means over the same steps."""
    from engine.cluster.cluster import Cluster
    from engine.data.lengths import step_lengths
    from engine.planner.settings import PlanSettings
    from engine.planner.ways import ways_out
    from engine.simulator.compare import compare

    first = config.planner.model_copy(update={"name": names[0]})  # the recipe's own may need more than those asked for
    with ways_out(config):
        settings = PlanSettings.of(config.model_copy(update={"planner": first}))
        found = compare(list(step_lengths(config, steps)), settings, names)
    swept = {"sweep": " ".join(extra)} if extra else {}
    shared = {"context": config.context, "lengths": config.lengths.name}
    devices = Cluster.of(config.cluster).largest_node
    return [swept | shared | run | {"host_node_bytes": int(run["host_bytes"]) * devices} for run in found]


def _compare_offload(runs: list[Run], first: list[str]) -> None:
    """Where offload is swept, add how many times faster each run is than the same one at the first ratio.

    None where that one failed.
    """
    base: dict[tuple[str, str], float] = {}
    for run in runs if first else ():
        swept = run["sweep"].split()
        point = run["planner"], " ".join(value for value in swept if not value.startswith(_OFFLOAD))
        if f"{_OFFLOAD}{first[0]}" in swept:
            base[point] = run["step_s"]
        run["offload_gain"] = base[point] / run["step_s"] if point in base else None


def _write_page(path: Path, config: Config, runs: list[Run]) -> None:
    from engine.data.lengths import step_lengths
    from engine.report.simulation_page import simulation_page

    output.write_page(path, simulation_page(config, runs, next(step_lengths(config, 1))).html())


def _text(runs: list[Run]) -> str:
    more = [_MORE[name] for name in _columns(runs) if name in _MORE]
    return ";\n".join([f"{_table(runs)}\n{_LEGEND}", *more])


def _table(runs: list[Run]) -> str:
    swept = ["sweep"] if "sweep" in runs[0] else []
    columns = ["planner", *swept, "ranks", "context", "lengths", *_SHOWN, *_columns(runs)]
    rows = [[_cell(name, run[name]) for name in columns] for run in runs]
    return output.table(columns, rows, right=True)


def _columns(runs: list[Run]) -> list[str]:
    """Return the columns of offload: where it is swept, and where something waits on the host."""
    gain = ["offload_gain"] if "offload_gain" in runs[0] else []
    return [*gain, *(_HOST if any(run["host_bytes"] for run in runs) else ())]


def _cell(name: str, value: Any) -> str:
    if name in _HOST:
        return f"{value / 2**30:,.1f} GiB"
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
