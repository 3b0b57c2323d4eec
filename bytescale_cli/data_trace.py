"""`bytescale data trace`: which documents were in a step of a run, or in which steps a document was."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, whole_number
from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.data.history import Traced

Run = Annotated[Path, typer.Argument(metavar="RUN", readable=False, help="Run folder.")]
Step = Annotated[int | None, typer.Option(parser=whole_number, metavar="N", help="A step, counted from 1.")]


def trace(
    run: Run,
    step: Step = None,
    document: Annotated[
        str | None,
        typer.Option(
            metavar="DOCUMENT", help="SOURCE:BLOCK:NUMBER, a path, path:LINE, or another place of a document."
        ),
    ] = None,
    sequences: Annotated[
        int, typer.Option(parser=whole_number, metavar="N", help="Show the first N sequences; --json has all.")
    ] = 100,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the documents of a step, or the steps of a document.

    A line is shown for each sequence: a document, or a piece of one. Its place refers to the present files; a document
    whose content has changed since then is marked.
    """
    if sequences < 1:
        raise ConfigError(f"must be at least 1, not {sequences}", key="--sequences", hint="for example --sequences 8")
    if (step is None) == (document is None):
        hint = "for example --step 10, or --document web:0:17, or --document texts/a.txt"
        raise ConfigError("give one of --step and --document", key="--step", hint=hint)
    from engine.config.units import counted
    from engine.data.history import History

    history, reason = History.of(run), None
    if document is None:
        assert step is not None
        found = history.trace_step(step)
        title = f"step {step}"
    else:
        found, reason = history.trace_document(document)
        # The number of finished steps shows how much was searched. Old files of the ledger may have been removed.
        steps = len({one.step for one in found})
        finished = f"{counted(history.finished, 'step')} of the run"
        title = f"{document} was in {steps:,} of {finished}" if found else f"{document} was in none of {finished}"
        first = history.ledger.first
        if first is not None and first > 1:
            title += f" (the ledger begins with step {first})"
        if reason is not None and not found:
            title += f": {reason}"
    # The text shows some of the sequences; the totals and the JSON include all of them.
    inputs, loss_tokens = (sum(getattr(one, name) for one in found) for name in ("length", "loss_tokens"))
    if found:
        documents = counted(len({one.document for one in found}), "document")
        title += f": {documents} in {counted(len(found), 'sequence')}, {counted(inputs, 'token')}"
        title += f", {loss_tokens:,} of them in the loss" if loss_tokens != inputs else ""
    answer = {"run": str(run), "finished": history.finished, "tokens": inputs, "loss_tokens": loss_tokens}
    answer |= {"step": step, "document": document, "reason": reason, "sequences": [one.to_json() for one in found]}
    output.emit({"trace": answer}, output.fill("\n".join([title, *_lines(found, sequences)])), as_json=json)


def _lines(found: list[Traced], most: int) -> list[str]:
    """Format the first `most` sequences as a table, with the problems of their documents, and how to show others."""
    if not found:
        return []
    rows = [
        [
            f"{one.step:,}",
            one.document.id,
            f"{one.start:,} to {one.start + one.length - 1:,}",
            f"{one.loss_tokens:,}",
            ",".join(map(str, one.ranks)),
            f"{one.document.hash:016x}",
            one.place.place or "",
        ]
        for one in found[:most]
    ]
    columns = ["step", "document", "inputs", "loss tokens", "ranks", "hash", "place"]
    problems = {f"{one.document.id}: {one.place.problem}": None for one in found[:most] if one.place.problem}
    lines = [output.table(columns, rows).rstrip("\n"), *problems]
    if rest := found[most:]:
        bad = sum(one.place.problem is not None for one in rest)
        more = f"{len(rest):,} more" + (f", {bad:,} of them with a problem" if bad else "")
        single = f", --document {rest[0].document.id} one document" if len({one.document for one in found}) > 1 else ""
        lines.append(f"{more}; --sequences {len(found)} shows all{single}")
    return lines
