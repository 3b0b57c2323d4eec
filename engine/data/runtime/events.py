"""What has happened in the data plane of a run: lines of JSON in the run folder, which several processes append.

| what | by | other keys |
|---|---|---|
| lost, taken | the supervisor of Ray | those of `Event` (engine/remote/supervisor.py) |
| scaled | a planning process | step, host (null: all together), before, after, source: see `scaled` |

All have `time`, in seconds since 1970. A run that continues from a checkpoint appends to the same file.
"""

from __future__ import annotations

import json
import time
from typing import Any

from engine.files import append
from engine.readers import LARGE, parse_line, read_bytes
from engine.run.folder import RunFolder

SCALED = "scaled"


class EventLog:
    """Appends events, each with one write, so that those of several processes do not mix."""

    def __init__(self, folder: RunFolder) -> None:
        """Raises OSError."""
        folder.plane_events.parent.mkdir(exist_ok=True)
        self._file = append(folder.plane_events)

    def note(self, what: str, **others: Any) -> None:
        """Append an event. Raises OSError."""
        self._file.write(json.dumps({"time": time.time(), "what": what} | others).encode() + b"\n")
        self._file.flush()

    def scaled(self, step: int, host: int | None, before: int, after: int, source: str | None) -> None:
        """Append that the planner of a step has changed the number of loaders. `source` has most of the work to do."""
        self.note(SCALED, step=step, host=host, before=before, after=after, source=source)

    def close(self) -> None:
        self._file.close()


def read_events(folder: RunFolder) -> list[dict[str, Any]]:
    """Return all events, in the order in which they were appended; none if there is no file.

    An incomplete last line and any malformed line are dropped. Raises DataError if it is no regular file, OSError.
    """
    try:
        lines = read_bytes(folder.plane_events, LARGE).splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            event = parse_line(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "what" in event and "time" in event:
            found.append(event)
    return found
