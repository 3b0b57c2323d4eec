"""What commands print: results on stdout, messages on stderr. On a terminal, lines fit its width."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from bytescale_cli import terminal
from engine import interrupts
from engine.errors import BytescaleError, StorageError

SCHEMA = 1
_GAP = "  "  # between the columns of a table
_LABELS = {"error:": "red", "warning:": "yellow"}
_SECONDS = 5.0  # between two lines of progress
_LEAST = 24  # characters of the narrowest column that is worth wrapping


def open_closed() -> None:
    """Connect stdout and stderr to the null device if the process was started without them, as with `>&-`."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def say(text: str) -> None:
    """Print one line on stderr; on a terminal, broken between words where it is longer than the terminal is wide."""
    text = terminal.fill(text, sys.stderr)
    label = text.partition(" ")[0]
    if label in _LABELS:
        text = terminal.painted(label, _LABELS[label], sys.stderr) + text.removeprefix(label)
    _print(text, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    """Print a line. Does nothing if the reader of the stream has exited, as in `| head`; raises any other OSError.

    Control characters, and those that the stream's encoding lacks, are written as escapes such as `\\xb5`. So are bytes
    of names of files that are not UTF-8.
    """
    encoding = stream.encoding or "utf-8"
    text = terminal.harmless(text).encode(encoding, "backslashreplace").decode(encoding)
    try:
        print(text, file=stream, flush=True)
    except OSError as error:
        # Discard the stream's buffer. Otherwise Python's flush at exit fails again and changes the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not isinstance(error, BrokenPipeError):
            error.filename = error.filename or str(stream.name).strip("<>")  # `stdout`, for the message
            raise


def progress(line: str) -> Callable[[int, int], None]:
    """Return a function that says `line`, a format of its two numbers, if it is called and 5 seconds have passed."""
    shown = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - shown > _SECONDS:
            shown = time.monotonic()
            say(line.format(done, total))

    return report


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
    interrupts.check()  # a command that was asked to end has no result
    if error is None or not as_json:
        _print(_envelope(True, payload) if as_json else text.rstrip("\n"), sys.stdout)
    if error is not None:
        error.found = {**payload, **error.found}
        raise error


def show(text: str) -> None:
    """Print on stdout a text that has no JSON, such as the partial result of a command that failed."""
    _print(text, sys.stdout)


def emit_failure(error: Mapping[str, Any]) -> None:
    """Print the JSON object of a command that failed."""
    _print(_envelope(False, error), sys.stdout)


def write_page(path: Path, html: str) -> None:
    """Write the page of `--plot` atomically and print its path. Raises StorageError if that fails."""
    write_file(path, html.encode(), "--plot")
    say(f"charts: {path}")


def write_trace(path: Path, content: bytes) -> None:
    """Write the timeline of `--trace` atomically and print its path. Raises StorageError if that fails."""
    write_file(path, content, "--trace")
    say(f"timeline: {path} (ui.perfetto.dev opens it)")


def write_file(path: Path, content: bytes, flag: str | None) -> None:
    """Write a file atomically; `flag` names it, if it was given. Raises StorageError if that fails."""
    from engine.files import write_durably

    try:
        write_durably(path, content)
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}"
        raise StorageError(message, key=flag, hint="free some space or choose another folder") from error


def fill(text: str) -> str:
    """Break the lines of a result between words at the width of the terminal (terminal.fill)."""
    return terminal.fill(text, sys.stdout)


def sections(keys: Sequence[str], questions: Mapping[str, Sequence[str]], rows: Sequence[Mapping[str, str]]) -> str:
    """Format a table for each question that columns answer: {"How fast is a step?": ["step_s", "speedup"], ...}.

    Each table begins with the columns `keys`. `rows` map columns to cells; columns that they do not have are left out.
    """
    texts = []
    for question, names in questions.items():
        columns = [name for name in names if name in rows[0]]
        if columns:
            cells = [[row[name] for name in (*keys, *columns)] for row in rows]
            texts.append(f"{title(question)}\n{table([*keys, *columns], cells, right=True)}")
    return "\n\n".join(texts)


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = False, width: int | None = None
) -> str:
    """Format rows under their column names; `right` aligns all columns but the first to the right.

    `width` applies if stdout is not a terminal; by default, lines are then not wrapped.

    No cell is ever cut. A table that is wider than the terminal takes the first of these forms that fits: the last
    column is wrapped between words; the last column is below each row; each row is a list of names and values. The
    first two are for text (`right=False`). Only words that are wider than the terminal, such as paths, exceed it.
    """
    rows = [["".join(c if c.isprintable() else "?" for c in cell) for cell in row] for row in rows]
    width, whole = terminal.width_of(sys.stdout) or width, _aligned(columns, rows, right)
    if width is None or terminal.cells(whole[0]) <= width:
        return _with_header(whole)
    if len(columns) > 1 and not right:
        others = _aligned(columns[:-1], [row[:-1] for row in rows], right)
        room = width - terminal.cells(others[0]) - len(_GAP)
        words = [columns[-1], *(word for row in rows for word in row[-1].split())]
        if room >= max(_LEAST, *map(terminal.cells, words)):
            broken = []
            for row in rows:
                first, *more = terminal.wrapped(row[-1], room)
                broken += [[*row[:-1], first], *([*([""] * (len(columns) - 1)), text] for text in more)]
            return _with_header(_aligned(columns, broken, right))
        if terminal.cells(others[0]) <= width:
            below = [fill(_GAP + row[-1]) if row[-1] else None for row in rows]
            lines = [line for pair in zip(others[1:], below, strict=True) for line in pair if line is not None]
            return _with_header([f"{others[0].rstrip()}\n{fill(_GAP + columns[-1])}", *lines])
    records = (list(zip(columns, row, strict=True)) for row in rows)
    return "\n\n".join(record(" ".join(first), others) for first, *others in records)


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]], right: bool) -> list[str]:
    """Format column names and rows as lines of the same width."""
    padded = []
    for at, column in enumerate(zip(columns, *rows, strict=True)):
        sizes = [terminal.cells(cell) for cell in column]
        spaces = [" " * (max(sizes) - size) for size in sizes]
        padded.append(
            [f"{space}{cell}" if right and at else f"{cell}{space}" for space, cell in zip(spaces, column, strict=True)]
        )
    return [_GAP.join(line) for line in zip(*padded, strict=True)]


def record(name: str, facts: Sequence[tuple[str, str]]) -> str:
    """Format facts, (what, value), as a list below a name, with the values in a column."""
    size = max((terminal.cells(fact) for fact, _ in facts), default=0)
    lines = [f"{_GAP}{fact}{' ' * (size - terminal.cells(fact))}{_GAP}{value}" for fact, value in facts]
    return "\n".join([title(fill(name)), *(fill(line.rstrip()) for line in lines)])


def _with_header(lines: Sequence[str]) -> str:
    header, *rows = (line.rstrip() for line in lines)
    return "\n".join([title(header), *rows])


def title(text: str) -> str:
    """Return text in bold on a terminal with colours, else unchanged."""
    return terminal.painted(text, "bold", sys.stdout)


def number(value: str | float | None, decimals: int = 3) -> str:
    """Format a value for a table: thousands separators, `decimals` for floats below 1,000, text unchanged.

    None becomes a dash.
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{decimals}f}"
    return value if isinstance(value, str) else f"{value:,}"


def _envelope(ok: bool, payload: Mapping[str, Any]) -> str:
    """Format a payload as JSON, with the version of the format and whether the command succeeded."""
    return json.dumps({"schema": SCHEMA, "ok": ok, **payload}, allow_nan=False)
