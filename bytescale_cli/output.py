"""What a command writes: stdout is data, stderr is talk. rich only on a terminal; it honours NO_COLOR by itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from engine.errors import StorageError

SCHEMA = 1


def open_closed() -> None:
    """Give the command streams that nobody reads for those that it was started without, as in `>&-`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def say(text: str) -> None:
    """Write one line of talk; nobody need be listening."""
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    """Print, and pass over a reader that has gone, as in `| head`: that is no failure of the work.

    What is left in the stream's buffer goes nowhere, else Python's last flush would fail again, and end in a code of
    its own.
    """
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


def say_when_compiling() -> None:
    """Say it if the planner's kernels have to be compiled first: that takes a while, once."""
    from engine.compiled import when_compiling

    when_compiling(lambda: say("compiling a part of the planner that was not needed before: up to 20 seconds, once"))


def emit(payload: Mapping[str, Any], text: str, *, as_json: bool) -> None:
    """Write a command's result: one JSON object, or the same for people."""
    _print(_envelope(True, payload) if as_json else text.rstrip("\n"), sys.stdout)


def show(text: str) -> None:
    """Write for people what was found before a command fails."""
    _print(text, sys.stdout)


def emit_failure(error: Mapping[str, Any]) -> None:
    """Write the one JSON object of a command that failed."""
    _print(_envelope(False, error), sys.stdout)


def write_page(path: Path, html: str) -> None:
    """Write a page of `--plot` whole or not at all, and say where it is. Raises StorageError if that fails."""
    from engine.files import write_durably

    try:
        write_durably(path, html.encode())
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}"
        raise StorageError(message, key="--plot", hint="free some space or name another place") from error
    say(f"pictures: {path}")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = False) -> str:
    """Return rows under their columns: drawn by rich on a terminal, else plain text in aligned columns.

    `right` aligns all columns but the first to the right, as numbers are read.
    """
    if sys.stdout.isatty():
        return _rich_table(columns, rows, right)
    drawn = []
    for number, column in enumerate(zip(columns, *rows, strict=True)):
        width = max(map(len, column))
        drawn.append([cell.rjust(width) if right and number else cell.ljust(width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*drawn, strict=True))


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: bool) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table()
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="right" if right and number else "left")
    for row in rows:
        drawn.add_row(*map(Text, row))
    console = Console()
    with console.capture() as capture:
        console.print(drawn)
    return capture.get()


def _envelope(ok: bool, payload: Mapping[str, Any]) -> str:
    return json.dumps({"schema": SCHEMA, "ok": ok, **payload}, allow_nan=False)
