"""The supervisor of the data plane on Ray, which the agent of the first node starts, and starts again if it ends.

    python -m engine.remote < PLANE

Its standard input has one line, a `Plane`, and stays open as long as the agent runs. It logs to its standard error.
"""

from __future__ import annotations

import logging
import select
import sys
import time
from contextlib import closing
from pathlib import Path

from engine.config.load import read_resolved
from engine.data.runtime.events import EventLog
from engine.errors import BytescaleError
from engine.remote.cluster import RayBoard, RayFleet, connect
from engine.remote.plane import Plane, namespace
from engine.remote.roles import RunRoles
from engine.remote.supervisor import Event, Supervisor
from engine.run.folder import RunFolder

_TURN_S = 0.1


def supervise(plane: Plane) -> None:
    """Supervise a data plane until the standard input ends; then end its actors.

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
        while not select.select([sys.stdin], [], [], _TURN_S)[0]:
            supervisor.turn(time.monotonic())
        supervisor.end()


def main() -> int:
    """Return the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    plane = Plane.of_json(sys.stdin.readline())
    try:
        supervise(plane)
    except BytescaleError as error:
        logging.getLogger(__name__).error("%s", error)
        return int(error.code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
