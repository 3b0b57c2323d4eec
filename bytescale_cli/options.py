"""Flags and arguments that several commands take, and flags that are other names of keys."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from engine.config.spelling import nearest
from engine.errors import ConfigError, Problem

_MOST_STEPS = 10_000  # to plan: hours

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="What to change, for example recipe=quickstart optimizer.lr=1e-4."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

Plot = Annotated[
    str | None, typer.Option("--plot", metavar="FILE", help="Write a page with pictures, for example page.html.")
]


def plot_path(plot: str | None) -> Path | None:
    """Return where the page of `--plot` goes, links followed. Raises ConfigError for what is no place for a page.

    Commands call it before they start their work.
    """
    if plot is None:
        return None
    if Path(plot).suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{plot} is no name of a page", key="--plot", hint="pages are HTML: --plot page.html")
    return writable(plot, "--plot")


def writable(name: str, flag: str) -> Path:
    """Return a file's path, links followed; raise ConfigError if it could not be written.

    Better now than after the work. A file is made and removed beside it: permissions do not tell all, root's least.
    """
    path = Path(os.path.realpath(name))
    try:
        if path.exists() and not path.is_file():
            raise OSError(0, "it is a folder or a device")
        if path.exists() and not os.access(path, os.W_OK):
            raise OSError(0, "it is read-only")
        handle, probe = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        Path(probe).unlink()
    except OSError as error:
        message = f"{name} cannot be written: {error.strerror}"
        raise ConfigError(message, key=flag, hint="name a file in a folder that you may write to") from error
    return path


def whole_number(text: str) -> int:
    """Return the number of a flag such as `--nproc 2`; Typer's own words for a bad one are not a user's."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text} is not a whole number") from None


def check_steps(steps: int, flag: str) -> None:
    """Raise ConfigError for a number of steps that is none, or would take days to plan."""
    if not 1 <= steps <= _MOST_STEPS:
        bound = "at least 1" if steps < 1 else f"at most {_MOST_STEPS:,}"
        raise ConfigError(f"must be {bound}, not {steps}", key=flag, hint=f"for example {flag} 3")


def choice(*options: str) -> Callable[[str], str]:
    """Return the parser of a flag that takes one of a few words."""

    def parse(text: str) -> str:
        if text not in options:
            near = nearest(text, options)
            raise typer.BadParameter(
                f"must be {' or '.join(options)}, not {text}." + (f" Did you mean {near}?" if near else "")
            )
        return text

    return parse


def with_aliases(overrides: Sequence[str], aliases: Mapping[tuple[str, str], str | int | None]) -> list[str]:
    """Return the overrides plus those that flags stand for: {("--out", "run.out"): "runs/a"} adds run.out=runs/a.

    Raises ConfigError for each flag whose key is given too, with another value.
    """
    given = dict(text.split("=", 1) for text in overrides if "=" in text)
    added, problems = [], []
    for (flag, key), value in aliases.items():
        if value is None:
            continue
        other = given.get(key)
        if other is None:
            added.append(f"{key}={value}")  # keys that are paths take any text
        elif other.strip("'\"") != str(value):
            problems.append(Problem(f"{value} contradicts {key}={other}", flag, "give one of the two"))
    if problems:
        raise ConfigError.of(problems)
    return [*overrides, *added]
