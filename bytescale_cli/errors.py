"""The one place where an error becomes lines and an exit code: the cause, the place, the way out."""

from __future__ import annotations

import errno
import os
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

import typer

from bytescale_cli import output
from engine.config.spelling import nearest
from engine.errors import BytescaleError, ExitCode, Problem, StorageError

# Typer carries its own copy of Click since 0.26: the class that all usage errors share is found through Typer.
UsageError = typer.BadParameter.__mro__[1]

_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS}


def report(error: BaseException, *, as_json: bool, debug: bool) -> int:
    """Say what went wrong, in JSON too if asked for, and return the exit code."""
    # Ctrl-C in compiled code comes out of it as a SystemError that has it as its cause.
    if isinstance(error, (KeyboardInterrupt, typer.Abort)) or isinstance(error.__cause__, KeyboardInterrupt):
        output.say("interrupted")
        if as_json:
            _emit_failure(BytescaleError("interrupted"), ExitCode.INTERRUPTED)
        return ExitCode.INTERRUPTED
    known = _known(error)
    for line in _lines(known.problems):
        output.say(line)
    if debug:
        output.say(_trace(error).rstrip())
    if as_json:
        _emit_failure(known, int(known.code))
    return int(known.code)


def _emit_failure(error: BytescaleError, code: int) -> None:
    """Write the failure as JSON, unless it is writing that fails: then its lines on stderr must do."""
    with suppress(OSError):
        output.emit_failure(_payload(error, code))


def _known(error: BaseException) -> BytescaleError:
    """Return the error as one of ours; what nothing here knows is a bug, and its traceback is saved."""
    if isinstance(error, BytescaleError) and (error.traced or error.code != ExitCode.BUG):
        return error
    if isinstance(error, UsageError):
        return _usage(error)
    if isinstance(error, OSError) and error.errno in _STORAGE:
        return StorageError(os.strerror(error.errno), key=_name(error.filename), hint="free some space or choose --out")
    message = " ".join(f"this is a bug in ByteScale: {type(error).__name__}: {error}".split())
    return BytescaleError(message, hint=f"please report it with {_save(_trace(error))}")


def _usage(error: BaseException) -> BytescaleError:
    """Return one of Typer's usage errors as ours; Typer's texts end in the nearest names, which become the hint."""
    context = getattr(error, "ctx", None)
    hint = f"see `{context.command_path if context else 'bytescale'} --help`"
    place = getattr(error, "option_name", None) or _parameter(error)
    message, _, meant = str(getattr(error, "message", error)).partition(" Did you mean ")
    if hasattr(error, "possibilities"):
        flags = [flag for flag in error.possibilities or () if nearest(str(place).strip("-"), [flag.strip("-")])]
        message, meant = "there is no such flag", " or ".join(flags)
    if meant:
        hint = f"did you mean {meant.replace(chr(39), '').rstrip('?')}?"
    usage = BytescaleError(message.rstrip(".") or "is missing", key=place, hint=hint)
    usage.code = ExitCode.USAGE
    return usage


def _parameter(error: BaseException) -> str | None:
    """Return the flag or argument that an error of Typer's is about."""
    parameter = getattr(error, "param", None)
    return None if parameter is None else str(parameter.opts[-1])


def _lines(problems: tuple[Problem, ...]) -> list[str]:
    """Return one mistake as its cause and the way out, or several as one line each."""
    if len(problems) > 1:
        return [f"error: {_cause(p)}" + (f"; {_flat(p.hint)}" if p.hint else "") for p in problems]
    (problem,) = problems
    return [f"error: {_cause(problem)}"] + ([f"hint: {_flat(problem.hint)}"] if problem.hint else [])


def _cause(problem: Problem) -> str:
    message = _flat(problem.message)
    return f"{_flat(problem.key)}: {message}" if problem.key else message


def _payload(error: BytescaleError, code: int) -> dict[str, object]:
    entries = [
        {"code": code, "message": problem.message, "key": problem.key, "hint": problem.hint}
        for problem in error.problems
    ]
    return {**error.found, "error": entries[0], "errors": entries}


def _flat(text: str) -> str:
    """Return text on one line, without the control characters that a user's value may carry."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _save(text: str) -> Path:
    handle, name = tempfile.mkstemp(prefix="bytescale-bug-", suffix=".txt")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    return Path(name)


def _name(filename: object) -> str | None:
    return None if filename is None else str(filename)
