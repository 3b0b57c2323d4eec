"""Writes docs/reference/: the config keys, from the schema, and the commands, from Typer.

    python -m bytescale_cli.reference

A test writes the pages again and compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bytescale_cli import main
from engine.config.explain.describe import Described, Key, describe, overview

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_WRITTEN_BY = "This page is written by `python -m bytescale_cli.reference`."


def keys() -> str:
    """The page of all keys, with what `bytescale config help KEY` shows of each."""
    first = overview()
    parts = [
        "# Config keys",
        f"{_WRITTEN_BY} Keys are set on the command line,\n"
        "`bytescale train context=32K optimizer.lr=1e-4`, or in a YAML file, which `bytescale recipes copy` writes.\n"
        "Defaults are those of the quickstart, a tiny model; `bytescale config show recipe=NAME` prints the values of\n"
        "another recipe.",
        "## Without a section",
        _table(first.keys),
    ]
    for name in first.inner:
        parts += _section(describe(name), level=2)
    return "\n\n".join(parts) + "\n"


def _section(found: Described, level: int) -> Iterator[str]:
    yield f"{'#' * level} {found.name}"
    if found.about:
        yield found.about
    if found.options:
        rows = [f"| `{found.name}={option}` | {_cell(about)} |" for option, about in found.options.items()]
        yield "\n".join(["| option | description |", "|---|---|", *rows])
    if found.keys:
        yield _table(found.keys)
    for name in found.inner:
        yield from _section(describe(name), level + 1)


def _table(found: list[Key]) -> str:
    rows = []
    for key in found:
        about = [key.about or "", f"for example `{key.example}`" if key.example else ""]
        default = f"`{key.default_text}`" if key.default_text else ""
        rows.append(f"| `{key.key}` | {_cell('; '.join(filter(None, about)))} | {_cell(key.kind)} | {_cell(default)} |")
    return "\n".join(["| key | meaning | value | default |", "|---|---|---|---|", *rows])


def commands() -> str:
    """The page of all commands, with what `--help` shows of each."""
    examples = "[docs/commands.md](../commands.md) has examples by task."
    intro = f"{_WRITTEN_BY} {examples} `bytescale COMMAND --help` prints the same.\n"
    omitted = "Options that most commands have are not repeated: `--json` prints one JSON object, `--debug` tracebacks."
    parts = ["# Commands", intro + omitted]
    for name, command in _commands(main.built(outline=False), "bytescale"):
        parts += [f"## {name}", command.help.strip()]
        context = command.context_class(command)
        records = [one.get_help_record(context) for one in command.params if one.name not in ("debug", "json")]
        rows = [f"| `{_cell(title)}` | {_cell(about)} |" for title, about in filter(None, records)]
        parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield each visible command that does something, with its full name, in the order of `--help`."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
    for word, one in (inner or {}).items():
        if not one.hidden:
            yield from _commands(one, f"{name} {word}")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES = {"keys.md": keys, "commands.md": commands}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())
