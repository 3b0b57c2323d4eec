"""`bytescale data head`: shows the first tokens of a step's sequences as text."""

from __future__ import annotations

import sys
from pathlib import Path
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
from bytescale_cli.terminal import painted
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.config.schema import Config
    from engine.data.head import Shown

_PROGRESS = "step {:,} of {:,}"


def head(
    overrides: Overrides = None,
    config_file: ConfigFile = None,
    run: Annotated[
        Path | None,
        typer.Option(metavar="RUN", readable=False, help="Run folder: show a step of this run, also while it runs."),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(parser=whole_number, metavar="N", help="Default: 1, or with --run the last finished step."),
    ] = None,
    tokens: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Show N tokens of a sequence.")] = 256,
    sequences: Annotated[int, typer.Option(parser=whole_number, metavar="N", help="Show N sequences.")] = 8,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the first tokens of a step's sequences as text.

    Tokens that do not count in the loss, such as those of a prompt, are dim on a terminal, else in [[...]]. Without
    --run, the order of documents is computed from the config; the documents up to the step are packed.
    """
    for flag, number in (("--step", step), ("--tokens", tokens), ("--sequences", sequences)):
        if number is not None and number < 1:
            raise ConfigError(f"must be at least 1, not {number}", key=flag, hint=f"for example {flag} 8")
    from engine.config.units import counted
    from engine.data.head import first_tokens, step_after, step_of_run
    from engine.data.history import History
    from engine.data.overview import Corpora
    from engine.data.steps import Cursor

    # The config of the run names its documents, so other overrides are rejected instead of ignored.
    if run is not None:
        if given := [*(overrides or []), *([f"--config {config_file}"] if config_file else [])]:
            raise ConfigError("already has a config", key="--run", hint=f"leave out {given[0]}")
        history = History.of(run)
        step, config = step or max(1, history.finished), history.config
        if step > history.finished:
            _check_step(step, config)
        corpora = history.corpora
        table = step_of_run(history, step, output.progress(_PROGRESS))
    else:
        # The order is known only after the blocks of the first window have been listed.
        step, config = step or 1, loaded(overrides, config_file)
        _check_step(step, config)
        opened = Corpora(config)
        opened.pack_first(Cursor(), about_documents(with_config(overrides, config_file)))
        say_toys(config, "documents")
        table, corpora = step_after(opened.steps, Cursor(), step, output.progress(_PROGRESS)), opened.sources
    # Totals are those of the whole step; the texts of only the first sequences are read.
    shown = first_tokens(corpora, config, table.chosen(slice(sequences)), tokens)
    inputs, loss_tokens = int(table.length.sum()), int(table.loss_tokens.sum())
    answer: dict[str, Any] = {"step": step, "sequences": len(table), "tokens": inputs, "loss_tokens": loss_tokens}
    answer |= {"shown": [one.to_json() for one in shown]}
    title = f"step {step}: {counted(len(table), 'sequence')}, {counted(inputs, 'token')}, {loss_tokens:,} in the loss"
    text = "\n\n".join([output.fill(title), *map(_describe, shown)])
    if len(shown) < len(table):
        text += f"\n\n{len(table) - len(shown):,} more; --sequences {len(table)} shows all"
    output.emit({"head": answer}, text, as_json=json)


def _check_step(step: int, config: Config) -> None:
    """Raise ConfigError for a step after the last one of a config: computing the steps before it may take days."""
    if step > config.run.steps:
        message = f"step {step:,} is after the last one (run.steps={config.run.steps:,})"
        raise ConfigError(message, key="--step", hint=f"choose a step up to {config.run.steps}")


def _describe(one: Shown) -> str:
    """Format a sequence: where it is, and its first tokens."""
    first, last = one.start, one.start + one.length - 1
    part = f"tokens {first:,} to {last:,}" + (f" of {one.inputs:,}" if one.inputs is not None else "")
    if one.length == one.inputs:
        part = f"{one.inputs:,} tokens"
    loss = "" if one.loss_tokens == one.length else f", {one.loss_tokens:,} in the loss"
    where = " ".join(filter(None, (one.place.place, f"({one.document.id})")))
    lines = [f"{where}: {part}{loss}"]
    if one.place.problem is not None:
        return "\n".join([*lines, f"warning: {one.place.problem}"])
    text = ""
    for piece in one.text:
        visible = _visible(piece.text)
        uncounted = painted(visible, "dim", sys.stdout)
        text += visible if piece.counted else uncounted if uncounted != visible else f"[[{visible}]]"
    return "\n".join([*lines, text + ("..." if len(one.ids) <= one.length else "")])


def _visible(text: str) -> str:
    """Replace control characters, which could change the output of the terminal."""
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)
