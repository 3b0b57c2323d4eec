"""Turns every error into lines on stderr (place, cause and hint) and an exit code. No other module does this."""

from __future__ import annotations

import os
import tempfile
import traceback
from contextlib import suppress
from typing import Any

import typer

from bytescale_cli import output
from engine.config.explain.spelling import nearest
from engine.errors import BytescaleError, ExitCode, Problem, memory_error, path_error, storage_error
from engine.interrupts import is_interrupt

# Typer has bundled Click since 0.26, so the base class of all usage errors is reached through Typer.
UsageError = typer.BadParameter.__mro__[1]
_MOST_KEYS = 3  # that a hint lists for an unknown flag


def report(error: BaseException, *, as_json: bool, debug: bool) -> int:
    """Print an error and its hints on stderr and return the exit code.

    `as_json` also prints a JSON object on stdout; `debug` adds the traceback.
    """
    if isinstance(error, typer.Abort) or is_interrupt(error):
        output.say("interrupted")
        if as_json:
            _emit_failure(BytescaleError("interrupted"), ExitCode.INTERRUPTED)
        return ExitCode.INTERRUPTED
    known = _known(error)
    if len(known.problems) == 1:
        (problem,) = known.problems
        lines = [f"error: {_cause(problem)}"] + ([f"hint: {_one_line(problem.hint)}"] if problem.hint else [])
    else:
        lines = [f"error: {_cause(p)}" + (f"; {_one_line(p.hint)}" if p.hint else "") for p in known.problems]
    for line in lines:
        output.say(line)
    if debug:
        output.say(_trace(error).rstrip())
    if as_json:
        _emit_failure(known, int(known.code))
    return int(known.code)


def _emit_failure(error: BytescaleError, code: int) -> None:
    """Print the JSON object of a failure: the results before it, and an entry per problem."""
    entries = [
        {"code": code, "message": problem.message, "key": problem.key, "hint": problem.hint}
        for problem in error.problems
    ]
    with suppress(OSError):  # stdout itself may have failed; stderr has the message
        output.emit_failure({**error.found, "error": entries[0], "errors": entries})


def _known(error: BaseException) -> BytescaleError:
    """Convert any exception to a BytescaleError. An unexpected one is a bug: its traceback is saved to a file."""
    if isinstance(error, BytescaleError) and (error.traced or error.code != ExitCode.BUG):
        return error
    if isinstance(error, UsageError):
        # Typer appends the nearest names to its message; move them to the hint.
        context = getattr(error, "ctx", None)
        hint = f"see `{context.command_path if context else 'bytescale'} --help`"
        parameter = getattr(error, "param", None)
        place = getattr(error, "option_name", None) or (None if parameter is None else _as_in_help(parameter))
        message, _, meant = str(getattr(error, "message", error)).partition(" Did you mean ")
        message = message[:1].lower() + message[1:]  # it follows `error: `
        if hasattr(error, "possibilities"):
            flags = [flag for flag in error.possibilities or () if nearest(str(place).strip("-"), [flag.strip("-")])]
            found = [] if context is None else _keys_of_flag(str(place), context)
            message, meant = "unknown flag", "" if found else " or ".join(flags)
            if found:
                hint = f"config values are KEY=VALUE, without dashes: {' or '.join(f'{key}=...' for key in found)}"
        if message.rstrip(".").endswith("requires an argument"):
            message, hint = "needs a value", f"write it after the flag: {place} VALUE"
        meant = " or ".join(_in_groups(message, context)) or meant
        if meant:
            hint = f"did you mean {meant.replace(chr(39), '').rstrip('?')}?"
        usage = BytescaleError(message.rstrip(".") or "is missing", key=place, hint=hint)
        usage.code = ExitCode.USAGE
        return usage
    if full := storage_error(error) or memory_error(error) or path_error(error):
        return full
    message = " ".join(f"this is a bug in ByteScale: {type(error).__name__}: {error}".split())
    handle, path = tempfile.mkstemp(prefix="bytescale-bug-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(_trace(error))
    return BytescaleError(message, hint=f"please report it and attach {path}")


def _in_groups(message: str, context: typer.Context | None) -> list[str]:
    """Return the commands of groups that an unknown command names: `ckpt export` for `export`."""
    if context is None or not message.startswith("no such command"):
        return []
    name, groups = message.split("'")[1], getattr(context.command, "commands", {})
    return [f"{group} {name}" for group, found in groups.items() if name in getattr(found, "commands", {})]


def _as_in_help(parameter: Any) -> str:
    """Return the name of a flag or of an argument that the help of its command shows."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper()).strip("[]")
    return str(parameter.opts[-1])


def _keys_of_flag(flag: str, context: typer.Context) -> list[str]:
    """Return the config keys that an unknown flag such as `--lr` names: at most three, none if there are more.

    Empty for commands that take no overrides.
    """
    if not any(param.metavar == "KEY=VALUE" for param in context.command.params):
        return []
    from engine.config import keys, tree

    name = flag.strip("-").replace("-", "_")
    found = [key for key in (*tree.groups(), *keys.leaves()) if name in (key, key.rpartition(".")[2])]
    found = [name] if name in found else list(dict.fromkeys(found))
    return found if len(found) <= _MOST_KEYS else []


def _cause(problem: Problem) -> str:
    """Format a problem without its hint: `place: message`, or only the message if it has no place."""
    message = _one_line(problem.message)
    return f"{_one_line(problem.key)}: {message}" if problem.key else message


def _one_line(text: str) -> str:
    """Put text on one line and replace control characters, which a user's value may contain."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
