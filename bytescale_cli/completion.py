"""`bytescale completion`: prints the completion script of a shell. The scripts call the hidden `bytescale candidates`.

Typer's own scripts cannot complete `recipe=ll<TAB>`: bash splits words at `=`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from bytescale_cli import output
from bytescale_cli.options import Debug, Json, choice

SHELLS = {"bash": "bash.sh", "zsh": "zsh.zsh", "fish": "fish.fish"}
PLANNERS = "A,B"  # the metavar of a list of planners
_PATHS = ("FILE", "DIR", "FOLDER", "PATH", "RUN", "CHECKPOINT", "HF_FOLDER", "PREFIX")  # metavars

Candidate = tuple[str, str]  # a word and its description; a word that ends with = or / is not complete yet


def completion(
    shell: Annotated[
        str, typer.Argument(parser=choice(*SHELLS), metavar="|".join(SHELLS), help="The shell to complete in.")
    ],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Print a script that completes commands, keys and values.

    Its first lines describe how to load it. For bash: source <(bytescale completion bash)
    """
    from importlib import resources  # slow to import

    script = resources.files("bytescale_cli") / "completions" / SHELLS[shell]
    text = script.read_text(encoding="utf-8")
    output.emit({"completion": {"shell": shell, "script": text}}, text, as_json=json)


def print_candidates(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(metavar="WORD", help="All words; the last is completed.")] = None,
    line: Annotated[str | None, typer.Option("--line", help="The command line up to the cursor, instead.")] = None,
) -> None:
    """Print what the last word can become: a line per candidate, with its description after a tab."""
    *before, current = (split(line)[1:] or [""]) if line is not None else (words or [""])
    root = context.find_root().command
    lines = [f"{word}\t{about}" for word, about in candidates(root, before, current)]
    if lines:
        output.show("\n".join(lines))


def split(line: str) -> list[str]:
    """Split a command line that ends at the cursor into words; quotes may be open. The last word may be empty."""
    for end in ("", '"', "'"):
        try:
            words = shlex.split(line + end)
        except ValueError:
            continue
        return [*words, ""] if not words or (not end and line[-1].isspace()) else words
    return line.split(" ")


def candidates(command: Any, before: Sequence[str], current: str) -> list[Candidate]:
    """List what `current` can become after the words `before`. `command` is the root of Typer's tree of commands."""
    option, given = None, 0
    for word in before:
        inner = getattr(command, "commands", {}).get(word)
        if option is not None:
            option = None  # the word is its value
        elif word.startswith("-"):
            option = _option(command, word)
        elif inner is not None:
            command, given = inner, 0
        else:
            given += 1
    if option is not None:
        found = _of(option.metavar, current)
    elif current.startswith("-"):
        found = _flags(command, current)
    elif hasattr(command, "commands"):
        inner = command.commands.items()
        found = ((name, one.get_short_help_str(80)) for name, one in inner if not one.hidden)
    else:
        places = [param for param in command.params if param.param_type_name == "argument"]
        place = places[min(given, len(places) - 1)] if places else None
        found = _of(place and (place.metavar or place.name.upper()), current)
    return sorted({word: about for word, about in found if word.startswith(current)}.items())


def _option(command: Any, word: str) -> Any:
    """Return the option of a command that `word` names and whose value is the next word; None if there is none."""
    named = (param for param in command.params if word in param.opts)
    return next((param for param in named if not param.is_flag), None)


def _flags(command: Any, current: str) -> Iterator[Candidate]:
    """Yield the flags of a command, or the values of the flag in `--flag=VALUE`."""
    flag, equals, value = current.partition("=")
    option = _option(command, flag) if equals else None
    if option is not None:
        yield from ((f"{flag}={word}", about) for word, about in _of(option.metavar, value))
        return
    for param in command.params:
        if param.param_type_name == "option" and not param.hidden:
            yield from ((name, param.help or "") for name in param.opts)
    yield "--help", "Show this message and exit."


def _of(metavar: str | None, current: str) -> Iterator[Candidate]:
    """Yield the values of a metavar, such as `auto|never|PATH`. Unknown ones, such as N, have none."""
    from engine.control.chaos import FAULTS
    from engine.control.progress import MOMENTS, PHASES

    for part in (metavar or "").strip("[].").split("|"):
        if part == "KEY=VALUE":
            yield from overrides(current)
        elif part == "KEY=A,B":
            yield from _listed(overrides, current)
        elif part == PLANNERS:
            yield from _listed(lambda last: _values("planner.name", last), current)
        elif part in ("KEY", "GROUP"):
            yield from ((word.removesuffix("="), about) for word, about in _keys() if part == "KEY")
        elif part == "FAULT":
            yield from ((name, "") for name in FAULTS)
        elif part == "PHASE":
            yield from ((name, "") for name in (*PHASES, *MOMENTS))
        elif part == "NAME":
            yield from _options("recipe")
        elif part in _PATHS:
            yield from _paths(current)
        elif part.islower():
            yield part, ""


def _listed(values: Any, current: str) -> Iterator[Candidate]:
    """Yield lists of values: those of the last item, after the items before it. For `KEY=A,B`, items follow the `=`."""
    first, comma, last = current.rpartition(",")
    key, equals, _ = current.partition("=")
    for word, about in values(f"{key}={last}" if comma and equals else last):
        yield (f"{first},{word.removeprefix(f'{key}=')}" if comma else word), about


def overrides(current: str) -> Iterator[Candidate]:
    """Yield the overrides that begin with a key, or with `KEY=` and a part of its value."""
    from engine.config import tree

    key, equals, value = current.partition("=")
    if not equals:
        yield from _keys()
        return
    if key in tree.groups():
        found: Iterable[Candidate] = _options(key)
        if key == "recipe":
            found = [*found, *_paths(value)] if value.startswith((".", "/", "~")) else found
    else:
        found = _values(key, value)
    yield from ((f"{key}={word}", about) for word, about in found)


def _keys() -> Iterator[Candidate]:
    """Yield `KEY=` for every group of recipes and every key of the schema."""
    from engine.config import keys, tree

    yield from ((f"{group}=", f"one of {', '.join(options[:3])}") for group, options in tree.groups().items())
    for key, field in keys.leaves().items():
        if key not in tree.groups():
            yield f"{key}=", field.description or ""


def _options(group: str) -> Iterator[Candidate]:
    """Yield the options of a group of recipes, with the comments at the top of their files."""
    from engine.config import tree

    yield from ((name, tree.about(tree.text_of(group, name))) for name in tree.groups()[group])


def _values(key: str, current: str) -> Iterator[Candidate]:
    """Yield the values of a key of the schema: those of an enum, true and false, null, paths."""
    from engine.config import choices, keys

    field = keys.leaves().get(key)
    yield from ((str(value), "") for value in choices.values_of(field))
    kinds = [field.annotation] if field else []
    for kind in kinds:
        if kind is bool:
            yield from (("true", ""), ("false", ""))
        elif kind is type(None):
            yield "null", ""
        else:
            kinds += get_args(kind) if get_origin(kind) is not dict else ()  # the members of a union
    if keys.is_path(key):
        yield from _paths(current)


def _paths(current: str) -> Iterator[Candidate]:
    """Yield the files and folders that a path can become; folders end with a slash."""
    folder, slash, name = current.rpartition("/")
    try:
        inside = sorted(Path(f"{folder}{slash}" or ".").expanduser().iterdir())
    except OSError:
        return
    for path in inside:
        if not path.name.isprintable():  # a line break would make two candidates of it
            continue
        if name.startswith(".") or not path.name.startswith("."):
            yield f"{folder}{slash}{path.name}" + ("/" if path.is_dir() else ""), ""
