"""Flags and arguments that several commands take, and flags that are other names of keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import typer

from engine.config.spelling import nearest
from engine.errors import ConfigError, Problem

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="What to change, for example recipe=quickstart optimizer.lr=1e-4."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def whole_number(text: str) -> int:
    """Return the number of a flag such as `--nproc 2`; Typer's own words for a bad one are not a user's."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text} is not a whole number") from None


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
