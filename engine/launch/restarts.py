"""Decides whether a run whose ranks have failed restarts from its last checkpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from engine.errors import BytescaleError, ExitCode, PreflightError
from engine.launch.agents.ranks import RankError
from engine.run import metrics
from engine.run.folder import RunFolder

_MOST = 3  # failures of a step
_MOST_BROKEN = 2  # failures of GPUs of a host: a new process does without a bad page, but not without a GPU
_WAITS_S = (10.0, 30.0, 60.0)  # before restarts after which a host could not be used, the last one for all others

# Mistakes of the user, and conditions that stay: the next start would fail too.
_FINAL = frozenset(
    {
        *(ExitCode.USAGE, ExitCode.PREFLIGHT, ExitCode.DATA, ExitCode.NO_CHECKPOINT, ExitCode.MEMORY),
        *(ExitCode.RUN_FOLDER, ExitCode.STORAGE),
    }
)


class StuckError(BytescaleError):
    """The same step failed several times: starting again does not help."""

    code = ExitCode.STUCK


@dataclass(frozen=True)
class Restart:
    """A start after a failure: the line that reports it, and the seconds to wait before it."""

    line: str
    wait_s: float = 0.0


class Restarts:
    """Counts the failures of a run."""

    def __init__(self, most: int, folder: RunFolder) -> None:
        """Allow at most `most` restarts."""
        self._most, self._folder = most, folder
        self._failed = Counter[int]()  # by step
        self._broken = Counter[str]()  # by host
        self._absent = 0  # restarts at which a host could not be used
        self._failure: RankError | None = None  # the last one of a rank

    def after(self, error: BytescaleError, start: int) -> Restart:
        """Return how the run starts again after an error; it had started after step `start`.

        Raises the error if a restart would not help, or none is left: at the first failure before any step was
        finished, the cause is most likely the config or the machine, and at the second failure of a GPU of one host.
        Raises StuckError if the step failed three times.
        If a host cannot be used at a restart, the error is that of the rank which had made the restart necessary.
        """
        (problem, *_) = error.problems
        if not isinstance(error, RankError):
            if self._failure is None or not isinstance(error, PreflightError):
                raise error
            self._absent += 1
            if (count := self._failed.total() + self._absent) > self._most:
                raise self._failure from error
            wait_s = _WAITS_S[min(self._absent, len(_WAITS_S)) - 1]  # a host that reboots, or a network that is down
            return Restart(f"{problem.message}; restart {count} of {self._most} in {wait_s:.0f} s", wait_s)
        done = max((line["step"] for line in metrics.read_metrics(self._folder.metrics)[-1:]), default=0)
        final = error.code in _FINAL and not error.hardware
        if error.asked or final or not self._most or (self._failure is None and done <= start):
            raise error
        self._broken[error.host] += error.hardware
        if self._broken[error.host] == _MOST_BROKEN:
            raise error
        self._failure = error
        step = done + 1
        self._failed[step] += 1
        if self._failed[step] == _MOST:
            message = f"step {step} failed {_MOST} times, the last time because {problem.message}"
            raise StuckError(message, key=problem.key, hint=problem.hint) from error
        if (count := self._failed.total() + self._absent) > self._most:
            raise error
        return Restart(f"{problem.message}; restart {count} of {self._most}")
