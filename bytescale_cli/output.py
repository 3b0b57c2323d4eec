"""What commands print: results on stdout, messages on stderr. rich is used on terminals only; it honours NO_COLOR."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from engine.errors import BytescaleError, StorageError

SCHEMA = 1


def open_closed() -> None:
    """Connect stdout and stderr to the null device if the process was started without them, as with `>&-`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def say(text: str) -> None:
    """Print one line on stderr."""
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    """Print a line. Does nothing if the reader of the stream has exited, as in `| head`; raises any other OSError."""
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        # Discard the stream's buffer. Otherwise Python's flush at exit fails again and changes the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            raise


def say_when_compiling() -> None:
    """Print a line when the first of the planner's @njit functions has to be compiled; nothing if all are cached."""
    from engine.compiled import when_compiling

    when_compiling(
        lambda: say(
            "compiling part of the planner; this takes up to a minute, once per installation; planning_s includes it"
        )
    )


def emit(payload: Mapping[str, Any], text: str, *, as_json: bool, error: BytescaleError | None = None) -> None:
    """Print a command's result: `payload` as one JSON object if `as_json`, else `text`.

    If `error` is given, the command has failed: raise it after the text. With `as_json`, print nothing here; the JSON
    object of the error will contain the payload.
    """
    if error is None or not as_json:
        _print(_envelope(True, payload) if as_json else text.rstrip("\n"), sys.stdout)
    if error is not None:
        error.found = {**payload, **error.found}
        raise error


def show(text: str) -> None:
    """Print on stdout the partial result of a command that failed."""
    _print(text, sys.stdout)


def emit_failure(error: Mapping[str, Any]) -> None:
    """Print the JSON object of a command that failed."""
    _print(_envelope(False, error), sys.stdout)


def write_page(path: Path, html: str) -> None:
    """Write the page of `--plot` atomically and print its path. Raises StorageError if that fails."""
    from engine.files import write_durably

    try:
        write_durably(path, html.encode())
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}"
        raise StorageError(message, key="--plot", hint="free some space or choose another folder") from error
    say(f"charts: {path}")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = False) -> str:
    """Format rows under their column names: a rich table on a terminal, else plain text in aligned columns.

    `right` aligns all columns but the first to the right.
    """
    if not sys.stdout.isatty():
        aligned = []
        for number, column in enumerate(zip(columns, *rows, strict=True)):
            width = max(map(len, column))
            aligned.append([cell.rjust(width) if right and number else cell.ljust(width) for cell in column])
        return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    formatted = Table()
    for number, column_name in enumerate(columns):
        formatted.add_column(column_name, justify="right" if right and number else "left")
    for row in rows:
        formatted.add_row(*map(Text, row))
    console = Console()
    with console.capture() as capture:
        console.print(formatted)
    return capture.get()


def number(value: str | float | None) -> str:
    """Format a value for a table: thousands separators, three decimals for floats below 1,000, text unchanged.

    None becomes a dash.
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"
    return value if isinstance(value, str) else f"{value:,}"


def _envelope(ok: bool, payload: Mapping[str, Any]) -> str:
    """Format a payload as JSON, with the version of the format and whether the command succeeded."""
    return json.dumps({"schema": SCHEMA, "ok": ok, **payload}, allow_nan=False)
