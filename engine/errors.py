"""What can go wrong, as types: each error knows its exit code, the place, and the way out.

The command line turns any of them into at most three lines and one exit code; no other layer prints or exits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

E = TypeVar("E", bound="BytescaleError")


class ExitCode(IntEnum):
    """Exit codes that schedulers and scripts rely on."""

    OK = 0
    USAGE = 2
    PREFLIGHT = 3
    DATA = 4
    NO_CHECKPOINT = 5
    MEMORY = 10
    BUG = 70
    RUN_FOLDER = 73
    STORAGE = 74
    PREEMPTED = 75
    HANG = 124
    INTERRUPTED = 130  # 128 + SIGINT, as shells count


@dataclass(frozen=True)
class Problem:
    """One mistake: what is wrong, where (`key` is an override or `file:line`), and the way out."""

    message: str
    key: str | None = None
    hint: str | None = None


class BytescaleError(Exception):
    """An error whose cause the user can mend. Subclasses say which exit code it ends in."""

    code: ExitCode = ExitCode.BUG
    traced: bool = False  # a traceback lies where `key` says
    found: Mapping[str, Any] = {}  # what was found before it, for the JSON object of the command

    def __init__(self, message: str, *, key: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.problems: tuple[Problem, ...] = (Problem(message, key, hint),)

    @classmethod
    def of(cls: type[E], problems: list[Problem]) -> E:
        """Return one error that reports all `problems` (at least one)."""
        first = problems[0]
        error = cls(first.message, key=first.key, hint=first.hint)
        error.problems = tuple(problems)
        return error


class ConfigError(BytescaleError):
    """A usage or config error; carries every mistake that was found, not only the first."""

    code = ExitCode.USAGE


class DataError(BytescaleError):
    """Documents that are missing, unreadable, malformed or not those the run started with."""

    code = ExitCode.DATA


class MemoryFitError(BytescaleError):
    """What was asked for does not fit in a rank's memory."""

    code = ExitCode.MEMORY


class CheckpointError(BytescaleError):
    """No valid checkpoint where one is needed."""

    code = ExitCode.NO_CHECKPOINT


class RunFolderError(BytescaleError):
    """A run folder that is locked or not writable."""

    code = ExitCode.RUN_FOLDER


class StorageError(BytescaleError):
    """The disk is full, or reading or writing failed."""

    code = ExitCode.STORAGE


class PreflightError(BytescaleError):
    """A check before the launch failed."""

    code = ExitCode.PREFLIGHT


class PlanError(BytescaleError):
    """A plan that `verify` refuses. `rule` is the number of the rule in `engine/planner/verify.py` that it breaks."""

    def __init__(self, rule: int, message: str) -> None:
        super().__init__(message)
        self.rule = rule

    def __reduce__(self) -> tuple[type[PlanError], tuple[int, str]]:
        """Return how to make it again: it travels from the planning process."""
        return PlanError, (self.rule, str(self))
