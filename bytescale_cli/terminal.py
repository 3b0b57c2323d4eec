"""Properties of a stream's terminal: its width, colours, and lines that fit."""

from __future__ import annotations

import os
import re
import shlex
import unicodedata
from contextlib import suppress
from typing import TextIO

_WIDTH = 80  # of a terminal that does not say
_STYLES = {"bold": 1, "dim": 2, "red": 31, "yellow": 33}  # SGR codes
_STYLE = re.compile(r"\x1b\[\d*m")
# Our own styles, and characters with which a text could change what a terminal shows around it: controls but tab and
# newline, and marks that reverse a text or end a line.
_CONTROL = re.compile(
    rf"\x1b\[(?:0|{'|'.join(map(str, _STYLES.values()))})m"
    r"|([\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069])"
)


def width_of(stream: TextIO) -> int | None:
    """Return the columns of the terminal behind `stream`, or None if it is not a terminal. COLUMNS overrides them."""
    if not stream.isatty():
        return None
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    with suppress(OSError, ValueError):  # ValueError: the stream has no file descriptor
        return os.get_terminal_size(stream.fileno()).columns or _WIDTH
    return _WIDTH


def is_live(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that can move its cursor, as progress bars need. TERM=dumb cannot."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def painted(text: str, style: str, stream: TextIO) -> str:
    """Return text in a style of _STYLES on a terminal with colours, else unchanged. Honours NO_COLOR."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if is_live(stream) and not os.environ.get("NO_COLOR") else text


def harmless(text: str) -> str:
    """Write control characters as escapes such as `\\x1b`. Documents, file names and logs may contain any."""
    return _CONTROL.sub(lambda found: ascii(found[1])[1:-1] if found[1] else found[0], text)


def fill(text: str, stream: TextIO) -> str:
    """Break lines between words at the width of the terminal. Without a terminal the text is unchanged.

    Continued lines are indented by two more spaces. A longer word, such as a path, stays whole.
    """
    width = width_of(stream)
    if width is None:
        return text
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += wrapped(line, width, indent) if cells(line) > width and " " in line.strip() else [line]
    return "\n".join(lines)


def wrapped(line: str, width: int, indent: str = "") -> list[str]:
    """Break a line between words, with `indent` before all lines but the first. Words are never broken."""
    lines = [""]
    for word in re.findall(r"\s*\S+", line):  # with the spaces before it
        if lines[-1].strip() and cells(lines[-1]) + cells(word) > width:
            lines.append(indent + word.lstrip())
        else:
            lines[-1] += word
    return lines


def pasteable(command: str, stream: TextIO) -> str:
    """Break a shell command between words at the width of the terminal, such that it can be copied and run.

    Without a terminal the command is unchanged.
    """
    width = width_of(stream)
    if width is None or cells(command) <= width:
        return command
    lines = [""]
    for word in map(shlex.quote, shlex.split(command)):
        if lines[-1] and cells(lines[-1]) + cells(word) + len("  \\") > width:
            lines.append(" ")
        lines[-1] += f" {word}" if lines[-1] else word
    return " \\\n".join(lines)


def cells(text: str) -> int:
    """Return how many columns a text takes: two for an East Asian character, none for a style."""
    text = _STYLE.sub("", text)
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else unicodedata.combining(c) == 0 for c in text)
