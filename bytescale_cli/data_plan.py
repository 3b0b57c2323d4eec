"""`bytescale data plan`: prints the stages of a mixture before a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from bytescale_cli import output
from bytescale_cli.options import (
    ConfigFile,
    Debug,
    Json,
    Overrides,
    about_documents,
    loaded,
    say_toys,
    whole_number,
    with_config,
)
from engine.errors import ConfigError, MemoryFitError

if TYPE_CHECKING:
    from engine.config.schema import Config
    from engine.data.scan import Documents
    from engine.data.stages import Stage, UsedUp
    from engine.job import Job

_POLICIES = {
    "repeat": "they are repeated",
    "drop": "the source is dropped, and the others get its weight",
    "stop": "this ends the run",
}


def plan(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    sample: Annotated[
        int | None,
        typer.Option(
            parser=whole_number,
            metavar="N",
            help="Read about N documents of each source. Default: all, or a sample of a large source.",
        ),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the stages of a mixture before a run.

    For each segment of data.mix: the tokens and documents of each source, its longest sequence, and whether the cluster
    holds it; and when a source is used up. Only lengths are read. Numbers with "about" are estimates.
    """
    if sample is not None and sample < 1:
        raise ConfigError(f"must be at least 1, not {sample}", key="--sample", hint="for example --sample 10000")
    from engine.data.lengths import document_lengths
    from engine.data.stages import compile_stages
    from engine.fit.check import fit_error
    from engine.job import Job

    config = loaded(overrides, config_file)
    if config.lengths.name != "data":
        hint = "name documents with data.path or data.sources, and set lengths=data"
        raise ConfigError("stages are made of documents, not of a mix or a file of lengths", key="lengths", hint=hint)
    found = document_lengths(config, sample, say=about_documents(with_config(overrides, config_file)))
    say_toys(config, "documents")
    job, compiled = Job(config), compile_stages(config, found)
    used_up = {one.source: one for one in compiled.used_up}
    stages = [_stage(one, config, job) for one in compiled.stages]
    answer: dict[str, Any] = {
        "steps": config.run.steps if compiled.ended is None else round(compiled.ended.step),
        "tokens": round(sum(one.tokens for one in compiled.stages)),
        "sources": [
            _source(name, one, compiled.epochs[name], used_up.get(name), config) for name, one in found.items()
        ],
        "stages": stages,
        "segments": len(config.data.mix) or 1,
        "ends": None if compiled.ended is None else _used_up(compiled.ended),
    }
    error = fit_error(job)
    output.emit({"data_plan": answer}, output.fill(_text(answer)), as_json=json, error=error)


def _source(name: str, found: Documents, epochs: float, used_up: UsedUp | None, config: Config) -> dict[str, Any]:
    """Describe the documents of a source; `estimated` if only a sample was read."""
    return {
        "name": name,
        "documents": round(len(found.lengths) / found.fraction),
        "tokens": round(found.tokens / found.fraction),
        "longest": int(found.lengths.max()),
        "empty": round(found.empty / found.fraction),
        "dropped": round(found.dropped / found.fraction),
        "estimated": found.fraction < 1,
        "epochs": epochs,
        "used_up": None if used_up is None else _used_up(used_up),
    }


def _used_up(one: UsedUp) -> dict[str, Any]:
    found = {"source": one.source, "lengths": _lengths(one.lengths), "step": round(one.step)}
    return found | {"tokens": round(one.tokens), "exhausted": one.policy}


def _lengths(lengths: tuple[int, int]) -> list[int] | None:
    """Return the lengths of a segment; None for any."""
    from engine.data.mixture import ANY

    return None if lengths == ANY else list(lengths)


def _stage(stage: Stage, config: Config, job: Job) -> dict[str, Any]:
    """Describe a stage. All of its numbers are estimates, apart from its segment and its longest sequence."""
    from engine.planner.checks import check_longest

    longest = min(stage.longest, config.context)
    try:
        check_longest(longest, job.settings)
        fits = True
    except MemoryFitError:
        fits = False
    return {
        "segment": stage.segment + 1,
        "schedule": stage.schedule,
        "lengths": _lengths(stage.lengths),
        "step": round(stage.first),
        "steps": round(stage.steps),
        "tokens_before": round(stage.tokens_before),
        "tokens": round(stage.tokens),
        "longest_document": stage.longest,
        "longest_sequence": longest,
        "fits": fits,
        "sources": [
            {"name": one.source, "share": one.share, "tokens": round(one.tokens), "documents": round(one.documents)}
            for one in stage.sources
        ],
    }


def _text(answer: dict[str, Any]) -> str:
    """Format the sources, a table of the stages, and when sources are used up."""
    from engine.config.units import counted, format_count

    rows = []
    for one in answer["sources"]:
        about = "about " if one["estimated"] else ""
        counts = [f"{about}{one['documents']:,}", f"{about}{one['tokens']:,}"]
        rows.append([one["name"], *counts, f"{one['longest']:,}", f"{one['dropped']:,}", f"{one['epochs']:.2f}"])
    columns = ["source", "documents", "tokens", "longest", "left out", "epochs, about"]
    text = output.table(columns, rows, right=True)
    rows = []
    for stage in answer["stages"]:
        for number, one in enumerate(stage["sources"]):
            begin = "" if number else f"{stage['segment']}"
            steps = "" if number else f"{stage['step']:,} to {stage['step'] + stage['steps']:,}"
            holds = "" if number else "yes" if stage["fits"] else "no"
            longest = "" if number else format_count(stage["longest_sequence"])
            counts = [f"{one['tokens']:,}", f"{one['documents']:,}"]
            rows.append([begin, steps, one["name"], f"{one['share']:.1%}", *counts, longest, holds])
    columns = ["segment", "steps, about", "source", "share", "tokens, about", "documents, about", "longest sequence"]
    text = f"{text}\n{output.table([*columns, 'fits'], rows, right=True)}\n"
    for stage in answer["stages"]:
        if stage["schedule"] != "constant":
            text += (
                f"segment {stage['segment']}: weights move to those of segment {stage['segment'] + 1} "
                f"({stage['schedule']}); its shares are means\n"
            )
    shown, last = answer["stages"][-1]["segment"], answer["segments"]
    if shown < last:
        missed = f"segment {last}" if shown + 1 == last else f"segments {shown + 1} to {last}"
        text += f"{missed}: not reached in {counted(answer['steps'], 'step')}\n"
    for used in sorted((one["used_up"] for one in answer["sources"] if one["used_up"]), key=lambda one: one["tokens"]):
        lengths = "" if used["lengths"] is None else " of {:,} to {:,} tokens".format(*used["lengths"])
        text += (
            f"{used['source']}: all documents{lengths} have been used after about {counted(used['step'], 'step')}, "
            f"{counted(used['tokens'], 'token')} of the run; {_POLICIES[used['exhausted']]}\n"
        )
    if ends := answer["ends"]:
        text += f"the run ends about there: {ends['source']} is used up\n"
    return text.rstrip("\n")
