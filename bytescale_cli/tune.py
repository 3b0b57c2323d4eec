"""`bytescale tune`: searches the settings with the shortest simulated step, without a GPU or torch."""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import (
    ConfigFile,
    Debug,
    Json,
    Overrides,
    about_documents,
    check_at_least,
    check_steps,
    chosen,
    config_as_typed,
    load_with_weights,
    new_recipe,
    say_toys,
    whole_number,
    with_config,
    write_recipe,
)
from bytescale_cli.progress import waiting

if TYPE_CHECKING:
    from engine.config.schema import Config
    from engine.errors import BytescaleError
    from engine.job import Job
    from engine.tune.search import Search, Trial

_SECONDS = 40  # with loading and checks, the command ends within a minute
_LOOK_S = 10.0  # for the number of nodes that is enough, if nothing fits
_QUESTIONS = {
    "What do they set?": ["tp", "pp", "ep", "zero.stage", "recompute", "offload.ratio", "capacity"],
    "How fast are they?": ["step_s", "tokens_per_s", "slower", "device_ms_per_token", "memory", "behind"],
}
_LEGEND = """slower: step time / that of the first
device_ms_per_token: time of all devices together
memory: peak of a device for the largest micro-batch that a plan may contain, or that of the plans if it is higher
behind: where it loses the most time against the first"""


def tune(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    steps: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Number of steps to average over.")] = 1,
    seconds: Annotated[
        int, typer.Option(parser=whole_number, metavar="S", help="Start no simulation after this time.")
    ] = _SECONDS,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Write the best as a recipe, for example best.yaml.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the fastest settings for a cluster. Searches tp, pp, ep, ZeRO stage, recompute, offload and capacity.

    Keys that are set on the command line keep their value.
    """
    # The time for reading documents counts, too.
    deadline = time.monotonic() + seconds
    check_steps(steps, "--steps")
    check_at_least(1, seconds, "--seconds")
    path = None if out is None else new_recipe(out, "--out")
    from engine.data.lengths import step_lengths
    from engine.job import Job
    from engine.report.words import source
    from engine.tune.search import search
    from engine.tune.space import SEARCHED

    # Keys that the user sets keep their value; those of the recipe are only where the search begins.
    with config_as_typed(config_file):
        typed = with_config(overrides, config_file)
        given = {key for key, equals, _ in (text.partition("=") for text in typed) if equals}
        fixed = [key for key in SEARCHED if key in given]
        config, broken = _load(chosen(typed), fixed)
    # All settings are compared on the same steps.
    job = Job(config)
    output.say_when_compiling()
    lengths = list(step_lengths(config, steps, about_documents(typed)))
    with waiting("searching"):
        found = search(job, lengths, deadline, fixed)
    best = found.best()
    if not best:
        raise _none(job, found, fixed, broken)
    # `fallen` has the number of settings excluded for each reason, so that a user can judge the search.
    rows = [_row(trial, best[0]) for trial in best]
    reasons = [{"reason": reason, **vars(fallen)} for reason, fallen in found.fallen.items()]
    answer: dict[str, Any] = {
        "best": rows,
        "recipe_step_s": found.own and found.own.step_s,
        "recipe_breaks": broken or None,
        "simulated": len(found.trials),
        "complete": not found.left,
        "left": found.left,
        "fallen": reasons,
        "fixed": fixed,
        "source": source(config),
    }
    text = _text(job, found, rows, fixed, broken, seconds)
    if path is not None:
        from engine.config.own_text import own_variant

        # The file builds on the recipe of the command line, the last one if several are named.
        base = next((text.partition("=")[2] for text in reversed(typed) if text.startswith("recipe=")), "quickstart")
        about = f"Found by `bytescale tune {shlex.join(typed)}`: {rows[0]['step_s']:.3f} s a step, simulated."
        use = f"To see its plans: bytescale plan --config {shlex.quote(str(path))}"
        winner = best[0].candidate.job.config
        write_recipe(path, own_variant(base.strip("'\""), winner, path, [about, use]), "--out")
        answer["file"] = str(path)
        text += f"\n\nwritten: {path}; use it by --config {shlex.quote(str(path))}"
    say_toys(config, "model", "lengths", "rates")
    output.emit({"tune": answer}, output.fill(text), as_json=json)


def _load(typed: Sequence[str], fixed: Collection[str]) -> tuple[Config, str]:
    """Load the config, and return the rule that its settings break, if other values of the searched keys break none.

    Else, or if its calibration cannot be used, raises ConfigError.
    """
    from engine.config.checks import check
    from engine.cost.model import machine
    from engine.fit.suggestions import with_values
    from engine.tune.space import layouts

    config = load_with_weights(typed, output.say, rules=False)
    problems = check(config)
    if all(check(with_values(config, changes)) for changes in layouts(config, fixed)):
        load_with_weights(typed)  # raises, and names the place of each problem
    machine(config)  # or each setting would fail for the same reason
    return config, "; ".join(f"{problem.key}: {problem.message}" for problem in problems)


def _none(job: Job, found: Search, fixed: Collection[str], broken: str) -> BytescaleError:
    """Create the error for when no settings fit and can be planned."""
    from engine.errors import ConfigError, MemoryFitError
    from engine.fit.check import fit_error
    from engine.tune.search import TOO_LARGE, UNPLANNED, enough_nodes

    too_large, unplanned = (found.fallen.get(reason) for reason in (TOO_LARGE, UNPLANNED))
    if too_large is None:
        message = f"no settings can be planned; {unplanned.example}" if unplanned else "no settings can be planned"
        return ConfigError(message, key="planner", hint="set fewer of the searched keys, or another planner")
    try:
        own = None if broken else fit_error(job, fixed, here=False)
    except ConfigError:  # the degrees of the recipe do not divide the devices of a hostfile
        own = None
    message, key, ways = f"no settings fit, for example {too_large.example}", "cluster.device_memory", []
    if own is not None:
        (problem,) = own.problems
        message, key = f"no settings fit; as given, {problem.message}", str(problem.key)
        # Other searched keys do not help, and there may be enough on fewer nodes than as given.
        ways = [way for way in own.found.get("ways", []) if "cluster.nodes" not in way["set"]]
    if unplanned is not None:
        message += f"; {unplanned.count:,} others cannot be planned, for example {unplanned.example}"
    nodes = enough_nodes(job, found.steps, fixed, time.monotonic() + _LOOK_S)
    hints = [*(way["set"] for way in ways), *([f"cluster.nodes={nodes}"] if nodes else [])]
    error = MemoryFitError(message, key=key, hint="; or ".join(hints) or "use more devices, or a smaller model")
    error.found = {"ways": ways}
    return error


def _row(trial: Trial, best: Trial) -> dict[str, Any]:
    """Return the settings of a trial and its facts, as JSON."""
    from engine.fit.suggestions import as_overrides
    from engine.tune.search import behind

    config, memory = trial.candidate.job.config, trial.memory
    return {
        "set": as_overrides(trial.candidate.changes),
        "tp": config.parallel.tp,
        "pp": config.parallel.pp,
        "ep": config.parallel.ep,
        "zero.stage": config.zero.stage,
        "recompute": config.recompute,
        "offload.ratio": config.offload.ratio if config.offload.ratio else 0,
        "capacity": config.capacity,
        "step_s": trial.step_s,
        "tokens_per_s": float(trial.facts["tokens_per_s"]),
        "slower": trial.step_s / best.step_s,
        "device_ms_per_token": 1000 * trial.device_s_per_token,
        "peak": memory.peak,
        "device_total": memory.device_total,
        "host": memory.host,
        "parts_s": trial.parts(),
        "behind": "" if trial is best else behind(trial, best),
    }


def _text(job: Job, found: Search, rows: list[dict[str, Any]], fixed: list[str], broken: str, seconds: int) -> str:
    """Format the best settings, a comparison with the recipe, and why others fall off."""
    from engine.config.units import counted
    from engine.report.words import memory_unit, source

    config, devices = job.config, job.cluster.ranks
    unit, size = memory_unit(max(row["peak"] for row in rows))
    cells = []
    for place, row in enumerate(rows, start=1):
        shown = {name: output.number(row[name]) for names in _QUESTIONS.values() for name in names if name in row}
        memory = f"{row['peak'] / size:,.1f} of {row['device_total'] / size:,.1f} {unit}"
        shown |= {"place": str(place), "memory": memory}
        cells.append(shown | {name: str(row[name]) for name in ("capacity", "offload.ratio")})
    head = f"{config.model.name}, {counted(devices, 'device')}, context={config.context}, {source(config)}, "
    head += f"planner {config.planner.name}"
    head += f"; kept as set: {', '.join(fixed)}" if fixed else ""
    first = []
    if found.left:
        message = f"incomplete: {counted(found.left, 'setting')} not simulated within the time limit"
        first = [f"{message}; set --seconds above {seconds}, or some of the keys, to find the fastest"]
    lines = [*first, head, "", output.sections(["place"], _QUESTIONS, cells), "", _LEGEND, ""]
    if broken:
        lines.append(f"the settings as given break a rule: {broken}")
    elif found.own is None:
        lines.append("the settings as given do not fit or cannot be planned")
    else:
        own = found.own.step_s
        lines.append(f"the settings as given: {own:.3f} s a step, {own / rows[0]['step_s']:.2f} x the first")
    for reason, fallen in found.fallen.items():
        example = f", for example {fallen.example}" if fallen.example else ""
        lines.append(f"{fallen.count:,} {reason}{example}")
    return "\n".join(lines)
