"""Why a rank failed: the contents of RUN/logs/rank-N.error.json, and the messages of agents to the launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import DataError, ExitCode, Problem
from engine.readers import read_object


@dataclass(frozen=True)
class Cause:
    """Why a rank failed."""

    code: int  # the exit code for it
    problem: Problem
    time: float | None = None  # when, on the clock of its host, if the rank itself has written it
    whole: bool = False  # the message names the host, and needs no rank before it
    hardware: bool = False  # a GPU has failed

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Cause:
        """Make a cause of what `to_json` returned, perhaps in an older version that knew less."""
        code, time = int(found.get("code", ExitCode.BUG)), found.get("time")
        problem = Problem(found.get("message", ""), found.get("key"), found.get("hint"))
        return cls(
            code,
            problem,
            None if time is None else float(time),
            found.get("whole", False),
            found.get("hardware", False),
        )

    @classmethod
    def read(cls, path: Path) -> Cause | None:
        """Read what a rank has written; None if there is nothing, or it is damaged."""
        try:
            return cls.of_json(read_object(path))
        except (OSError, DataError, ValueError, TypeError):
            return None

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are written and sent."""
        problem = self.problem
        found = {"code": int(self.code), "message": problem.message, "key": problem.key, "hint": problem.hint}
        flags = {name: True for name in ("whole", "hardware") if getattr(self, name)}
        return found | ({} if self.time is None else {"time": self.time}) | flags
