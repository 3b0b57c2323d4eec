"""`bytescale data`: packs documents into token files, looks for faults in them, and shows which ones a step has."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bytescale_cli import output
from bytescale_cli.data_head import head
from bytescale_cli.data_plan import plan
from bytescale_cli.data_trace import trace
from bytescale_cli.data_watch import watch
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
    writable,
)
from bytescale_cli.profile_data import length_table
from engine.errors import ConfigError, DataError, Problem

if TYPE_CHECKING:
    from engine.config.schema import Config
    from engine.data.lint.findings import Finding, Tally

app = typer.Typer(help="Pack, check, plan, trace and watch documents.")
app.command()(head)
app.command()(plan)
app.command()(trace)
app.command()(watch)

Workers = Annotated[
    int | None, typer.Option(parser=whole_number, metavar="N", help="Processes. Default: one per core.")
]


@app.command()
def pack(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    out: Annotated[str, typer.Option(metavar="PREFIX", help="Write PREFIX.bin, .idx, .hash and .json.")] = "tokens",
    workers: Workers = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Tokenize documents into a token file.

    It is in Megatron's format. For example: bytescale data pack data=jsonl data.path=a.jsonl
    data.tokenizer=tokenizer.json --out a. Train on it with data=tokens data.path=a. If it is interrupted, the same
    command continues.
    """
    _check(workers, "--workers", 8)
    from dataclasses import asdict

    from engine.config.units import counted
    from engine.data.pack import pack as write
    from engine.data.token_facts import quarantine_path
    from engine.data.tokenizers.load import check_weights

    config = loaded(overrides, config_file)
    if config.data.format == "tokens":
        hint = "choose documents with data=folder or data=jsonl, and data.path"
        raise ConfigError("is a token file already", key=config.data.place, hint=hint)
    if config.data.sources:
        hint = "pack each source separately, with data.path and without data.sources and data.mix"
        raise ConfigError("has several sources; a token file has one", key=config.data.place, hint=hint)
    check_weights(config)
    prefix = Path(str(writable(f"{out}.bin", "--out", new_folder=True)).removesuffix(".bin"))
    # Documents that were left out are reported: a user may expect all of them in the result.
    facts = write(config.data, prefix, workers, output.progress("{:,} of {:,} blocks"), output.say)
    counts = f"{counted(facts.documents, 'document')}, {counted(facts.tokens, 'token')} of {facts.tokenizer}"
    text = f"{prefix}: {counts}, vocabulary {facts.vocabulary:,}"
    if facts.empty:
        text += f"; {counted(facts.empty, 'empty document')} {'was' if facts.empty == 1 else 'were'} left out"
    if facts.dropped:
        text += f"; {facts.dropped:,} {'was' if facts.dropped == 1 else 'were'} left out by data.transform"
    if facts.broken:
        text += f"; {counted(facts.broken, 'document')} could not be used, see {quarantine_path(prefix)}"
    # The line to paste names the vocabulary and the tokenizer, because the defaults of a recipe may differ from those
    # of the file.
    use = ["data=tokens", f"data.path={prefix}", f"model.vocab={facts.vocabulary}"]
    if facts.tokenizer != "bytes":
        use.append(f"data.tokenizer={config.data.tokenizer}")
    shown = f"{output.fill(text)}\nuse it with {shlex.join(use)}"
    output.emit({"pack": {"out": str(prefix), **asdict(facts)}}, shown, as_json=json)


@app.command()
def lint(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    workers: Workers = None,
    examples: Annotated[
        int, typer.Option(parser=whole_number, metavar="N", help="Show N documents of each finding.")
    ] = 5,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Find faults in documents, as data.transform leaves them.

    Reads all of them: broken ones, encodings, ids, copies, lengths. docs/data.md lists the codes of findings. The exit
    code is 4 if training would reject a document or a file (L01 to L05), or if nothing can be trained on, else 0.
    """
    _check(workers, "--workers", 8)
    _check(examples, "--examples", 20)
    from engine.config.sources import source_configs
    from engine.config.units import counted
    from engine.data.lint.faults import Limits
    from engine.data.lint.findings import CHECKS
    from engine.data.lint.lint import lint as read
    from engine.data.tokenizers.load import check_weights
    from engine.data.transforms.transforms import TRANSFORMS

    config = loaded(overrides, config_file)
    say = about_documents(with_config(overrides, config_file))
    # Some findings depend on the config: ids beyond its vocabulary, documents longer than its context or batch.
    limits = Limits(config.context, config.batch_tokens, config.model.vocab)
    sources = list(source_configs(config.data).values())
    if any(one.format != "tokens" for one in sources):
        check_weights(config)
    found, of_sources = read(sources, limits, examples, workers, output.progress("{:,} of {:,} blocks"), say)
    lengths = found.lengths_found()
    findings = [
        {
            "code": finding.code,
            "level": "error" if CHECKS[finding.code].refused else "warning",
            "message": CHECKS[finding.code].what,
            "reason": finding.reason or None,
            "count": finding.count,
            "examples": [{"place": example.place, "detail": example.detail} for example in finding.examples],
            "hint": finding.hint,
        }
        for finding in found.findings.values()
    ]
    # The findings are printed in any case; the error comes after them and decides the exit code.
    error = None
    if found.refused:
        # A file that cannot be read to its end counts as refused, but is no document.
        files = sum(finding.count for finding in found.findings.values() if finding.code == "L01")
        parts = [f"{counted(files, 'file')} cannot be read to {'its' if files == 1 else 'their'} end"] if files else []
        if documents := found.refused - files:
            parts.insert(0, f"{documents:,} of {counted(found.documents, 'document')} cannot be trained on")
        error = DataError(", and ".join(parts), key=config.data.place, hint="fix the errors above")
    elif problems := list(_refused_sources(config, of_sources)):
        error = DataError.of(problems)
    answer = {"documents": found.documents, "tokens": found.tokens, "refused": found.refused, "lengths": lengths}
    answer |= {"transforms": dict(found.changed)}
    text = f"{config.data.place}: {counted(found.documents, 'document')}, {counted(found.tokens, 'token')}\n"
    if changed := [f"{name} {TRANSFORMS[name].did} {count:,}" for name, count in found.changed.items()]:
        text += f"data.transform: {', '.join(changed)}\n"
    text += "" if lengths is None else f"{length_table(lengths)}\n"
    text += "".join(f"\n{_finding(finding)}" for finding in found.findings.values())
    text += "" if found.findings or error else "\nno findings"
    say_toys(config, "documents")
    output.emit({"lint": answer | {"findings": findings}}, output.fill(text), as_json=json, error=error)


def _refused_sources(config: Config, found: Iterable[Tally | DataError]) -> Iterator[Problem]:
    """Yield the problem of each source that training refuses as a whole, from what was found in each."""
    from dataclasses import replace

    import numpy as np

    from engine.config.sources import source_configs
    from engine.data.stages import check_lengths

    for name, one in zip(source_configs(config.data), found, strict=True):
        try:
            if isinstance(one, DataError):
                raise one
            check_lengths(name, np.array(sorted(one.lengths)), config.data)
        except DataError as error:
            (problem,) = error.problems
            yield replace(problem, key=f"data.sources.{name}") if config.data.sources else problem


def _finding(finding: Finding) -> str:
    """Format a finding: what and how many, its examples, and what to do."""
    from engine.config.units import counted
    from engine.data.lint.findings import CHECKS

    check, reason = CHECKS[finding.code], f": {finding.reason}" if finding.reason else ""
    times = counted(finding.count, "time")
    lines = [f"{'error' if check.refused else 'warning'} {finding.code}, {times}: {check.what}{reason}"]
    lines += [f"  {example.place}: {example.detail}" for example in finding.examples]
    lines += [f"  ... {finding.count - len(finding.examples):,} more"] * (finding.count > len(finding.examples))
    return "\n".join([*lines, f"  hint: {finding.hint}\n"])


def _check(number: int | None, flag: str, example: int) -> None:
    """Raise ConfigError that names `flag` unless its value is at least 1, or None."""
    if number is not None and number < 1:
        raise ConfigError(f"must be at least 1, not {number}", key=flag, hint=f"for example {flag} {example}")
