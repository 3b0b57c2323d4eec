"""A Ray of two hosts on this machine: a head, which is host 0, and a node, which is host 1.

`python -m tests.remote.cluster FOLDER` prints its address, and ends with its standard input. Each host has a cache
folder of its own, FOLDER/host-N.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from engine.remote.plane import ADDRESS, host_resource

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2): processes whose parents end become children of this one
_STORE = 80 << 20


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """Start it; yield its address, which is also in the environment."""
    command = [sys.executable, "-m", "tests.remote.cluster", str(folder)]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        address = process.stdout.readline().strip()
        assert address, "Ray has not started"
        before = os.environ.get(ADDRESS)
        os.environ[ADDRESS] = address
        try:
            yield address
        finally:
            os.environ.pop(ADDRESS)
            if before is not None:
                os.environ[ADDRESS] = before
            process.stdin.close()
            process.wait(60)


def main(folder: str) -> None:
    """Run it until the standard input ends."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    warnings.simplefilter("ignore")
    from ray.cluster_utils import Cluster

    common = {"num_cpus": 1, "object_store_memory": _STORE, "node_ip_address": "127.0.0.1"}
    cluster = Cluster()
    for host in range(2):
        os.environ["XDG_CACHE_HOME"] = f"{folder}/host-{host}"
        of_head = {} if host else {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
        cluster.add_node(**common, **of_head, resources={host_resource(host): 1000})
    sys.stdout.write(f"{cluster.address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    cluster.shutdown()
    for process in psutil.Process().children(recursive=True):  # what survives its parent
        process.kill()


if __name__ == "__main__":
    main(sys.argv[1])
