"""The commands that there are, for tests that hold for each of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from bytescale_cli.main import app


def commands() -> list[str]:
    """Return the words of every command that users see, such as `ckpt list`."""
    return list(_inside(typer.main.get_command(app), ""))


def _inside(group: Any, before: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _inside(command, f"{before}{name} ")
        elif not command.hidden:
            yield f"{before}{name}"
