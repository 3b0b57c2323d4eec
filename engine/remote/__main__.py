"""The supervisor of the data plane on Ray, which the agent of the first node starts, and starts again if it ends.

    python -m engine.remote < PLANE

Its standard input has one line, a `Plane`, and stays open as long as the agent runs. It logs to its standard error. Its
standard output is for the agent: {} when each role has an actor for the first time, a `Cause` if that cannot be.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from engine.config.load import read_resolved
from engine.data.runtime.events import EventLog
from engine.errors import BytescaleError
from engine.remote.cluster import RayBoard, RayFleet, connect
from engine.remote.plane import Plane, namespace
from engine.remote.roles import RunRoles
from engine.remote.supervisor import Event, SupersededError, Supervisor
from engine.run.cause import Cause
from engine.run.folder import RunFolder

_TURN_S = 0.1


def supervise(plane: Plane, completed: Callable[[], None]) -> None:
    """Supervise a data plane until the standard input ends; then end its actors. Calls `completed` at most once.

    What happens is appended to the run folder, as lines of JSON. Raises PreflightError if Ray cannot be reached,
    and errors of `Supervisor.turn`.
    """
    folder, space = RunFolder(Path(plane.folder)), namespace(plane.folder)
    ray = read_resolved(folder.resolved).data.ray
    connect(space)
    with closing(EventLog(folder)) as log:

        def note(event: Event) -> None:
            log.note(**event._asdict())

        fleet = RayFleet(space, RunRoles(plane))
        supervisor = Supervisor(len(plane.hosts), ray.standbys, ray.deadline, RayBoard(space), fleet, note)
        supervisor.begin(time.monotonic())
        told = False
        while not select.select([sys.stdin], [], [], _TURN_S)[0]:
            supervisor.turn(time.monotonic())
            if supervisor.complete and not told:
                completed()
                told = True
        supervisor.end()


def _tell(agent: int, message: Mapping[str, Any]) -> None:
    with suppress(BrokenPipeError):  # it has ended
        os.write(agent, json.dumps(message).encode() + b"\n")


def main() -> int:
    """Return the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    agent = os.dup(1)
    os.dup2(2, 1)  # libraries print
    try:
        supervise(Plane.of_json(sys.stdin.readline()), lambda: _tell(agent, {}))
    except BytescaleError as error:
        logging.getLogger(__name__).error("%s", error)
        if not isinstance(error, SupersededError):  # else the next one may be the only one
            _tell(agent, Cause(error.code, error.problems[0], whole=True).to_json())
        return int(error.code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
