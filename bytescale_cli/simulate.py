"""`bytescale simulate`: simulates the plans of several planners on a modelled cluster, without a GPU or torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import (
    ConfigFile,
    Debug,
    Json,
    Overrides,
    Plot,
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
from bytescale_cli.progress import waiting
from engine.errors import BytescaleError, ConfigError, ExitCode, Problem

Run = dict[str, Any]

if TYPE_CHECKING:
    from engine.config.schema import Config
    from engine.job import Job
    from engine.planner.settings import PlanSettings
    from engine.simulator.hollow import Hollow
    from engine.units import Ints

    Point = tuple[Config, list[str]]  # one combination of swept values, with its overrides
    Compared = tuple[Config, dict[str, PlanSettings]]  # with the settings of each row
    Found = tuple[Compared, list[Run]]

_OFFLOAD = "offload.ratio="
_QUESTIONS = {
    "How fast is a step?": ["step_s", "tokens_per_s", "speedup", "speedup_tuned", "offload_gain"],
    "Where does its time go?": ["compute_s", "exposed_comm_s", "bubble", "mfu"],
    "How much host memory does offload take?": ["host_bytes", "host_node_bytes"],
}
_WORLD = ("ranks", "context", "lengths")  # what all runs have in common, unless it is swept
_SEARCH_S = 40  # of the best settings for static, at each point of a sweep
_LEGEND = """speedup: step time of static with the settings of this config / this row's
compute_s: mean time a rank spends computing
exposed_comm_s: mean time a rank spends only waiting for transfers
bubble: fraction of the step during which a rank is idle
the rest of step_s reduces gradients and updates weights
mfu: model FLOPs / peak FLOPs of all devices"""
_HOST = ("host_bytes", "host_node_bytes")
_EQUATION = """naive and balanced offload by equation 3 of the paper (docs/paper.md)
no eq. 3: they offload only what the capacity needs
offload.ratio=0 compares all planners without offload"""
_MORE = {  # legends of columns that not every table has
    "speedup_tuned": "speedup_tuned: step time of static at its best settings / this row's",
    "offload_gain": "offload_gain: step time at the first offload.ratio of the sweep / step time",
    "host_bytes": "host_bytes: peak host memory per device",
    "host_node_bytes": "host_node_bytes: upper bound of host memory per node",
}


def simulate(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    steps: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Number of steps to average over.")] = 1,
    planners: Annotated[
        str | None, typer.Option(metavar="A,B", help="Planners to compare, by default all; static is always included.")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B", help="Simulate each value, e.g. context=256K,2M. Repeat to combine keys."),
    ] = None,
    tuned: Annotated[
        bool, typer.Option("--tuned/--no-tuned", help="Search the best settings for static, as `tune planner=static`.")
    ] = True,
    plot: Plot = None,
    trace: Trace = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare planners on a modelled cluster. Shows step time, tokens per second, bubbles, speed-up.

    Static has two rows: with the settings of the config, and at its best settings.
    """
    check_steps(steps, "--steps")
    swept: dict[str, list[str]] = {}
    for text in sweep or []:
        key, _, values = text.partition("=")
        if not key or not all(values.split(",")):
            raise ConfigError(f"{text!r} is not KEY=A,B", key="--sweep", hint="for example --sweep context=256K,2M")
        swept[key] = values.split(",")
    if len(swept) < len(sweep or []):
        raise ConfigError("a key is swept twice", key="--sweep", hint="give all its values at once: KEY=A,B,C")
    from engine.config.schema import BASELINE
    from engine.planner.planners import PLANNERS

    # A sweep of `planner` selects rows of the comparison: every point has all its planners anyway.
    names = swept.pop("planner", planners.split(",") if planners is not None else [*PLANNERS])
    unknown = [name for name in names if name not in PLANNERS]
    if unknown:
        hint = f"one or more of {','.join(PLANNERS)}"
        raise ConfigError(f"unknown planner {unknown[0]!r}", key="--planners", hint=hint)
    names = list(dict.fromkeys([BASELINE, *names]))  # each once; speed-ups are relative to the first
    path, timeline = plot_path(plot), trace_path(trace)
    with config_as_typed(config_file):  # reports a wrong value before the first run
        typed = with_config(overrides, config_file)
        given = chosen(typed)
        say = cache(about_documents(given))  # each line once, not at every point
        points = list(_points(given, swept, say))
    # Equal configs, such as those of 256K and 262144, would be two rows that only seem to differ.
    said = dict[str, str]()
    for config, extra in points:
        same, words = config.model_dump_json(), " ".join(extra)
        if same in said:
            message = f"simulates the same config twice: {said[same]} and {words}"
            raise ConfigError(message, key="--sweep", hint="give each value once")
        said[same] = words
    output.say_when_compiling()
    found, failures = _found(points, names, steps, tuned, say)
    runs = [run for _, of_point in found for run in of_point]
    recipe = [] if any(text.startswith("recipe=") for text in typed) else [f"recipe={points[0][0].recipe}"]
    tune = f"bytescale tune {shlex.join([*recipe, *typed])}"
    _compare_offload(runs, swept.get("offload.ratio", [])[:1])
    # The page and the trace show the first point that could be simulated.
    if (path is not None or timeline is not None) and found:
        from engine.data.lengths import step_lengths

        config, compared = found[0][0]
        lengths = next(step_lengths(config, 1, say))
        if path is not None:
            from engine.report.simulation_page import simulation_page

            output.write_page(path, simulation_page(config, runs, lengths, compared, tune).html())
        if timeline is not None:
            from engine.report.chrome_trace import chrome_trace
            from engine.report.simulation_page import simulated_planners

            output.write_trace(timeline, chrome_trace(simulated_planners(lengths, compared)))
    # What could be simulated is printed before the error, and is part of its JSON.
    if failures:
        if runs and not json:
            output.show(_text(runs, tune))
        error = failures[0].of([problem for failure in failures for problem in failure.problems])
        error.found = {"runs": runs}
        raise error  # the exit code is that of the first failure
    say_toys(found[0][0][0], "model", "lengths", "rates")
    warnings = say_warnings(one for (config, _), of_point in found for one in _hollow(config, of_point))
    output.emit({"runs": runs, "warnings": warnings}, _text(runs, tune), as_json=json)


def _points(overrides: list[str], swept: dict[str, list[str]], say: Callable[[str], None]) -> Iterator[Point]:
    """Yield the config and the added overrides of every combination of swept values; without a sweep, one config."""
    from itertools import product

    for values in product(*swept.values()):
        extra = [f"{key}={value}" for key, value in zip(swept, values, strict=True)]
        try:
            yield load_with_weights([*overrides, *extra], say, say), extra
        except ConfigError as error:
            raise _in_run(error, extra) from error


def _found(
    points: list[Point], names: list[str], steps: int, tuned: bool, say: Callable[[str], None]
) -> tuple[list[Found], list[BytescaleError]]:
    """Simulate each point of a sweep; return the results, and the errors of points that failed.

    One failure does not stop the other points. Without a sweep, and for a bug, the error is raised.
    """
    from engine.job import Job

    found, failures, first = [], [], Job(points[0][0])
    for config, extra in points:
        try:
            found.append(_runs(first.with_config(config), names, steps, extra, tuned, say))
        except BytescaleError as error:
            if not extra or error.code == ExitCode.BUG:
                raise
            failures.append(_in_run(error, extra))
    return found, failures


def _in_run(error: BytescaleError, extra: list[str]) -> BytescaleError:
    """Return an error of the same type, with the swept values added to its messages."""
    where = f" (in the run with {' '.join(extra)})" if extra else ""
    return error.of([Problem(f"{one.message}{where}", one.key, one.hint) for one in error.problems])


def _runs(job: Job, names: list[str], steps: int, extra: list[str], tuned: bool, say: Callable[[str], None]) -> Found:
    """Simulate the same steps of one job under each planner; return a run per row, with means over the steps."""
    from engine.data.lengths import step_lengths
    from engine.fit.check import check_fit
    from engine.report.words import source, without_address
    from engine.simulator.compare import TUNED, compare, rows

    config = job.config
    first = config.planner.model_copy(update={"name": names[0]})  # the recipe's planner may have stricter limits
    modelled = job.with_config(config.model_copy(update={"planner": first}))
    check_fit(modelled, here=False)
    lengths = list(step_lengths(config, steps, say))
    best, about = _tuned_static(job, lengths) if tuned else (None, {})
    # naive has no second row if the sweep compares offload itself.
    swept_offload = any(value.startswith(_OFFLOAD) for value in extra)
    compared = rows(modelled.settings, names, best)
    if swept_offload:
        compared = {label: own for label, own in compared.items() if own.equation_3}
    swept = {"sweep": " ".join(extra)} if extra else {}
    shared = {"context": config.context, "lengths": config.lengths.name, "source": source(config)}
    shared["rates"] = without_address(modelled.settings.costs.source)
    devices = job.cluster.largest_node
    found = []
    for run in compare(lengths, compared):
        more: Run = about if run["label"] == TUNED else {}
        against = {"speedup_tuned": None} if tuned else {}  # if nothing fits
        found.append(swept | shared | against | run | {"host_node_bytes": int(run["host_bytes"]) * devices} | more)
    return (config, compared), found


def _hollow(config: Config, runs: list[Run]) -> list[Hollow]:
    """Warnings about a point's run with the planner of the config, and about its documents."""
    from engine.data.lengths import corpus_tokens
    from engine.simulator.hollow import empty_capacity, low_balance, small_corpus

    found = small_corpus(config, corpus_tokens(config))
    for run in runs:
        if run["label"] == config.planner.name:
            found += low_balance(config, run["balance"])
            found += empty_capacity(config, run["ranks"], run["largest_micro_batch"])
    return found


def _tuned_static(job: Job, lengths: list[Ints]) -> tuple[PlanSettings | None, Run]:
    """The settings at which static is the fastest, and facts of the search, as JSON; None if nothing fits."""
    import time

    from engine.fit.suggestions import as_overrides
    from engine.tune.search import tuned_static

    with waiting("searching the best settings for static"):
        search = tuned_static(job, lengths, time.monotonic() + _SEARCH_S)
    if not search.trials:
        return None, {}
    best = search.best()[0].candidate
    tried = len(search.trials) + sum(fallen.count for fallen in search.fallen.values())
    about = {"set": as_overrides(best.changes), "complete": not search.left, "left": search.left, "tried": tried}
    return best.job.settings, about


def _compare_offload(runs: list[Run], first: list[str]) -> None:
    """If offload.ratio is swept, add `offload_gain` to each run: its speed-up over the same run at the first ratio.

    The gain is None if the run at the first ratio failed. `first` contains that ratio; it is empty without such a
    sweep.
    """
    base: dict[tuple[str, str], float] = {}
    for run in runs if first else ():
        swept = run["sweep"].split()
        point = str(run["label"]), " ".join(value for value in swept if not value.startswith(_OFFLOAD))
        if f"{_OFFLOAD}{first[0]}" in swept:
            base[point] = run["step_s"]
        run["offload_gain"] = base[point] / run["step_s"] if point in base else None


def _text(runs: list[Run], tune: str) -> str:
    """Format the tables of all runs, the legend of their columns, and the sources of their lengths.

    If static at its best settings is the fastest, a line reports it, with `tune`, the command that searches other
    settings.
    """
    from engine.config.schema import BASELINE
    from engine.config.units import counted
    from engine.report.headline import slower

    # Static at its best settings may have other degrees; its ranks are shown with these settings.
    varying = [name for name in _WORLD if len({run[name] for run in runs if not run["tuned"]}) > 1]
    common = [f"{name} {output.number(runs[0][name])}" for name in _WORLD if name not in varying]
    keys = ["planner", *(["sweep"] if "sweep" in runs[0] else []), *varying]
    shown = [name for names in _QUESTIONS.values() for name in names if name in runs[0]]
    if not any(run["host_bytes"] for run in runs):
        shown = [name for name in shown if name not in _HOST]
    cells = [
        {name: str(run[name]) if name == "sweep" else output.number(run[name]) for name in keys}
        | {name: f"{run[name] / 2**30:,.1f} GiB" if name in _HOST else output.number(run[name]) for name in shown}
        | {"planner": str(run["label"])}
        for run in runs
    ]
    legend = [_LEGEND, *(_MORE[name] for name in shown if name in _MORE)]
    if any(run["host_bytes"] and run["equation_3"] for run in runs):
        legend.append(_EQUATION)
    for run in runs:
        if run["tuned"]:
            where = f" of {run['sweep']}" if "sweep" in run else ""
            state = "" if run["complete"] else f", incomplete: {run['left']:,} of {run['tried']:,} not simulated"
            legend.append(f"{run['label']}{where}: {run['set']} ({counted(run['ranks'], 'HDP rank')}){state}")
    # For each point of a sweep, a line reports if the fixed mesh at its best settings is faster than every other
    # planner.
    for sweep in dict.fromkeys(run.get("sweep") for run in runs):
        here = sorted((run for run in runs if run.get("sweep") == sweep), key=lambda run: float(run["step_s"]))
        fastest = next((run for run in here if run["planner"] != BASELINE), None)
        if here[0]["tuned"] and fastest and fastest["step_s"] > here[0]["step_s"]:
            legend.append(slower(fastest, here[0], tune).text)
    sources = "; ".join(dict.fromkeys(run["source"] for run in runs))
    lines = [", ".join(common), "", output.sections(keys, _QUESTIONS, cells), "", *legend]
    rates = "; ".join(dict.fromkeys(run["rates"] for run in runs))
    return output.fill("\n".join([*lines, f"lengths: {sources}", f"rates: {rates}"]).lstrip("\n"))
