"""What has happened in the data plane of a run: lines of JSON in the run folder.

Each process appends to a separate file, RUN/data/events-HOST-PID.jsonl: on a network file system, lines that several
hosts append to one file may overwrite each other.

| what | by | other keys |
|---|---|---|
| lost, taken | the supervisor of Ray | those of `Event` (engine/remote/supervisor.py) |
| scaled | a planning process | step, host (null: all together), before, after, source: see `scaled` |
| queue | the planner on Ray | waiting, packing: those of `Queued` (engine/data/blocks/work.py) |

All have `time`, in seconds since 1970.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from engine.data.blocks.work import Queued
from engine.files import append
from engine.readers import LARGE, parse_line, read_bytes
from engine.run.folder import RunFolder

SCALED, QUEUE = "scaled", "queue"
_PAUSE_S = 1.0  # at least, between two events of a queue
_EVENTS = 3600  # of a queue, after which the pause between two grows with their number


class EventLog:
    """Appends events, each with one write: others of this process may be open."""

    def __init__(self, folder: RunFolder) -> None:
        """Raises OSError."""
        folder.plane_events.mkdir(exist_ok=True)
        self._file = append(folder.plane_events / f"events-{socket.gethostname()}-{os.getpid()}.jsonl")

    def note(self, what: str, **others: Any) -> None:
        """Append an event. Raises OSError."""
        self._file.write(json.dumps({"time": time.time(), "what": what} | others).encode() + b"\n")
        self._file.flush()

    def scaled(self, step: int, host: int | None, before: int, after: int, source: str | None) -> None:
        """Append that the planner of a step has changed the number of loaders. `source` has most of the work to do."""
        self.note(SCALED, step=step, host=host, before=before, after=after, source=source)

    def close(self) -> None:
        self._file.close()


class QueueLog:
    """Appends how many blocks wait and are being packed, when that has changed, in a thread of its own.

    It ends if that cannot be written; the run does not.
    """

    def __init__(self, folder: RunFolder, queued: Callable[[], Queued]) -> None:
        self._folder, self._queued, self._ended = folder, queued, threading.Event()
        self._thread = threading.Thread(target=self._run, name="queue", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and append the last change."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with closing(EventLog(self._folder)) as log:
                last, count, ended = None, 0, False
                while not ended:
                    ended = self._ended.wait(pause_s(count))
                    if (now := self._queued()) != last:
                        log.note(QUEUE, **now._asdict())
                        last, count = now, count + 1
        except OSError as error:
            logging.getLogger(__name__).warning("events of the data plane cannot be written: %s", error)


def pause_s(events: int) -> float:
    """Return the least time between two events of a queue after so many. A month has at most 140,000."""
    return _PAUSE_S * max(1.0, events / _EVENTS)


def read_events(folder: RunFolder) -> list[dict[str, Any]]:
    """Return all events by time, those of a process in the order in which it has appended them.

    An incomplete last line and any malformed line are dropped. Raises DataError if a file is no regular one, OSError.
    """
    files = sorted(folder.plane_events.glob("events-*.jsonl"))
    return [*heapq.merge(*map(_read, files), key=lambda event: event["time"])]


def _read(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in read_bytes(path, LARGE).splitlines():
        try:
            event = parse_line(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "what" in event and type(event.get("time")) in (int, float):
            found.append(event)
    return found
