"""The result of a check of the doctor, and the list that collects results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, ParamSpec

from engine.errors import BytescaleError

P = ParamSpec("P")
State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """The result of a check.

    `value` is what was found, without names of users, hosts or folders: reports of bugs contain it (report.py).
    """

    name: str
    state: State
    message: str  # one line
    value: str | None = None
    hint: str | None = None  # how to get out of it, for warnings and failures
    section: str = ""


def ok(name: str, message: str, value: str | None = None) -> Check:
    """The result of a check that has found nothing wrong."""
    return Check(name, "ok", message, value)


def warning(name: str, message: str, hint: str, value: str | None = None) -> Check:
    """The result of a check that has found something that stops no run."""
    return Check(name, "warning", message, value, hint)


def failed(name: str, message: str, hint: str, value: str | None = None) -> Check:
    """The result of a check that has found something that stops runs, or makes them wrong or slow."""
    return Check(name, "failed", message, value, hint)


def skipped(name: str, reason: str) -> Check:
    """The result of a check that does not apply, or that another failure makes impossible."""
    return Check(name, "skipped", reason)


class Checks:
    """Runs checks and collects their results, in order."""

    def __init__(self) -> None:
        self.found: list[Check] = []

    def add(
        self,
        section: str,
        name: str,
        look: Callable[P, Check | Sequence[Check]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> bool:
        """Run one check, or several of a section; return whether none has failed.

        An exception makes a failed check `name`: the other checks still run.
        """
        result: Check | Sequence[Check]
        try:
            result = look(*args, **kwargs)
        except BytescaleError as error:
            (problem, *_) = error.problems
            result = failed(name, problem.message, problem.hint or "")
        except Exception as error:
            message = " ".join(f"the check itself failed: {type(error).__name__}: {error}".split())
            result = failed(name, message, "this is a bug in ByteScale; please report it")
        checks = [result] if isinstance(result, Check) else result
        self.found += [replace(check, section=section) for check in checks]
        return all(check.state != "failed" for check in checks)
