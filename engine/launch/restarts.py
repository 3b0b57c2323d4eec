"""Decides whether a run whose ranks have failed goes on from its last checkpoint."""

from __future__ import annotations

from collections import Counter

from engine.errors import BytescaleError, ExitCode
from engine.launch.ranks import RankError
from engine.run import metrics
from engine.run.folder import RunFolder

_MOST = 3  # failures of a step

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


class Restarts:
    """Counts the failures of a run."""

    def __init__(self, most: int, folder: RunFolder) -> None:
        """Allow at most `most` restarts."""
        self._most, self._folder = most, folder
        self._failed = Counter[int]()  # by step

    def after(self, error: RankError, start: int) -> str:
        """Return the line that says that the run starts again after an error; it had started after step `start`.

        Raises the error if a restart would not help, or none is left: at the first failure before any step was
        finished, the cause is most likely the config or the machine. Raises StuckError if the step failed three times.
        """
        done = max((line["step"] for line in metrics.read_metrics(self._folder.metrics)[-1:]), default=0)
        (problem,) = error.problems
        if error.code in _FINAL or not self._most or (not self._failed and done <= start):
            raise error
        step = done + 1
        self._failed[step] += 1
        if self._failed[step] == _MOST:
            message = f"step {step} failed {_MOST} times, the last time because {problem.message}"
            raise StuckError(message, key=problem.key, hint=problem.hint) from error
        if (count := self._failed.total()) > self._most:
            raise error
        return f"{problem.message}; restart {count} of {self._most}"
