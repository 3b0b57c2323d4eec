"""A Ray of two hosts on this machine, 127.0.0.1 and 127.0.0.2, each with a cache folder of its own, and its agents."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from engine.control.protocol import RayNode
from engine.job import Job
from engine.launch.agents import data_plane
from engine.launch.agents.data_plane import DataPlane
from engine.remote.checks import version
from engine.run.cause import Cause
from engine.run.folder import RunFolder

HOSTS, RANKS = 2, 4
ADDRESSES = ["127.0.0.1", "127.0.0.2"]
_MEMORY = 400 << 20
_LOOK_S = 0.05


class Agents:
    """What the agents of both hosts do for the data plane of a run, in a thread."""

    def __init__(self, folder: RunFolder, job: Job, caches: Path, ray: str | None) -> None:
        """Start Ray and the supervisor; only the supervisor if there is an address of a `ray`."""
        self._folder, self._ray = folder, ray
        self._caches, self.causes = caches, list[Cause]()
        places = [[job.mesh.place(host * RANKS + rank) for rank in range(RANKS)] for host in range(HOSTS)]
        self._hosts = [sorted({one.hdp for one in of_host}) for of_host in places]
        self.planes = list[DataPlane]()
        self._closed, started = threading.Event(), threading.Event()
        # Processes are started in this thread, and end with it.
        self._thread = threading.Thread(target=self._run, args=(started,))
        self._thread.start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        try:
            for host in range(HOSTS if self._ray is None else 1):
                node = RayNode(host, version() or "", _MEMORY, self._ray, [] if host else self._hosts, "1")
                environment = os.environ | {"XDG_CACHE_HOME": str(self._caches / f"host-{host}")}
                head = self.planes[0].address if host else None
                self.planes.append(DataPlane(node, self._folder, environment, ADDRESSES[host], head, b"a secret"))
            started.set()
            while not self._closed.wait(_LOOK_S):
                self.causes += [cause for plane in self.planes if (cause := plane.look()) is not None]
        finally:
            started.set()
            for plane in reversed(self.planes):
                plane.close()

    @property
    def environment(self) -> Mapping[str, str]:
        """How processes connect."""
        return self.planes[0].environment

    @property
    def supervisor(self) -> int:
        """Its process; waits for one."""
        last = time.monotonic() + 60
        while (process := self.planes[0]._supervisor) is None:
            assert time.monotonic() < last
            time.sleep(_LOOK_S)
        return process.pid

    def ray(self, host: int) -> list[psutil.Process]:
        """All processes of Ray on a host, with the actors and what they have started."""
        node = self.planes[host]._node
        assert node is not None
        found = list[psutil.Process]()
        for one in psutil.Process(node._guard.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if "engine.remote.guard" not in one.cmdline():
                    found.append(one)
        return found

    def server(self) -> psutil.Process | None:
        """The process of the head that dies alone."""
        return self.named("gcs_server", 0)

    def named(self, name: str, host: int) -> psutil.Process | None:
        """The process of Ray on a host with a name, if there is one."""
        for one in self.ray(host):
            with suppress(psutil.NoSuchProcess):
                if one.name() == name:
                    return one
        return None

    def close(self) -> None:
        self._closed.set()
        self._thread.join()


@contextmanager
def running(folder: RunFolder, job: Job, caches: Path, ray: str | None = None) -> Iterator[Agents]:
    """Run Agents; how to connect is in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_plane, "_MOST_ENDS", 10_000)  # supervisors that a test kills
        agents = Agents(folder, job, caches, ray)
        try:
            for name, value in agents.environment.items():
                if name != "XDG_CACHE_HOME":  # that of a host; the reference has a cache of its own
                    patch.setenv(name, value)
            yield agents
        finally:
            agents.close()
    assert not agents.causes
