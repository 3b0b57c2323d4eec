"""Starts the processes of Ray on a node and ends: `python -m engine.remote.start < SETTINGS`.

It prints their process numbers by name, or {"error": why}, as JSON in one line. The guard of the node has started it
(guard.py) and becomes the parent of the processes.

`ray start` is not used: if grpcio is installed, it also opens port 10001, at which Ray's client server executes code,
and no option prevents that. `Node` is what it calls, as does `ray.cluster_utils` for Ray's own tests.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from engine.remote.node import Settings
from engine.selection import first_line

_LOG_BYTES = 2048  # of the end of each log of Ray that is shown after a failure


def start(settings: Settings) -> dict[str, int]:
    """Start Ray's processes, and return their numbers by name. They outlive this process."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    class Quiet(Node):  # type: ignore[misc]
        """A node without the server of the dashboard and the jobs API, which Ray also starts without a dashboard."""

        def start_api_server(self, **how: Any) -> None:
            pass

    address = settings.head_address
    parameters = RayParams(
        node_ip_address=settings.address,
        node_name=f"{settings.number}",
        **({"gcs_server_port": settings.port} if settings.head == settings.address and settings.is_head else {}),
        **({} if settings.is_head else {"gcs_address": address}),
        temp_dir=settings.session,
        num_cpus=1,
        num_gpus=0,
        resources={settings.resource: 1000},
        memory=settings.memory - settings.object_store,
        object_store_memory=settings.object_store,
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
    )
    node = Quiet(parameters, head=settings.is_head, shutdown_at_exit=False, spawn_reaper=False)
    return {name: processes[0].process.pid for name, processes in node.all_processes.items()}


def logged(session: Path) -> str:
    """Return the ends of the logs of Ray's processes, which are removed with the folder of the node."""
    found = []
    for path in sorted(session.glob("session_2*/logs/*")):
        if path.name.startswith(("gcs_server", "raylet")) and path.is_file() and path.stat().st_size:
            found.append(f"{path.name}:\n{path.read_bytes()[-_LOG_BYTES:].decode(errors='replace')}")
    return "\n".join(found)


def main() -> None:
    """Start Ray, and end without ending it."""
    settings = Settings.of_json(sys.stdin.readline())
    answers = os.dup(1)
    os.dup2(2, 1)  # Ray prints
    try:
        answer: dict[str, Any] = start(settings)
    except Exception as error:  # whatever Ray raises, it is the answer
        print(logged(Path(settings.session)), file=sys.stderr)
        answer = {"error": first_line(error)}
    os.write(answers, json.dumps(answer).encode() + b"\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Ray's own exit handlers would end what was started


if __name__ == "__main__":
    main()
