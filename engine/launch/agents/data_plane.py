"""The data plane of a node on Ray (data.runtime=ray), of which its agent takes care.

```
 agent of the first node                          agent of another node
    | starts a guard, which starts Ray's head        | learns where the head is, from its parent
    | starts the supervisor when Ray is up           | starts a guard, which starts a node of that head
```
With data.ray.address there is only the supervisor: Ray runs already. Imports no ray.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.control.processes import StopWatch, end_with_parent, is_stopped
from engine.control.protocol import RayNode
from engine.errors import ExitCode, PreflightError, Problem
from engine.files import append
from engine.readers import parse_line
from engine.remote import checks
from engine.remote.checks import own_environment
from engine.remote.node import NodeRay, environment_of, object_store, token_of
from engine.remote.plane import START, Plane
from engine.run.cause import Cause
from engine.run.folder import RunFolder

if TYPE_CHECKING:
    from engine.config.schema import Ray

_AGAIN_S = 0.5  # before a supervisor that has ended is started again
_END_S, _LOOK_S = 5.0, 0.02
_MOST_ENDS = 5  # of supervisors in a row that did not find an actor for each role


def check_ray(ray: RayNode, variables: Mapping[str, str]) -> None:
    """Raise PreflightError if this host cannot be a node of the data plane."""
    problem = checks.version_problem(ray.version)
    if problem is None and ray.address is None:
        problem = checks.shared_memory_problem(object_store(ray.memory))
    elif problem is None and ray.address is not None:
        problem = checks.token_problem(variables) or checks.address_problem(ray.address)
    if problem is not None:
        raise PreflightError.of([problem])


class DataPlane:
    """Ray on this node, and on the first one the supervisor."""

    def __init__(
        self,
        ray: RayNode,
        folder: RunFolder,
        environment: Mapping[str, str],
        address: str,
        head: str | None,
        secret: bytes,
    ) -> None:
        """Start Ray with the `address` of this node; the first node has no `head`. Returns at once. Raises OSError.

        `environment` becomes the attribute of this name: the variables of ranks, which may connect to this Ray.
        """
        self._ray, self._folder, self._host = ray, folder, socket.gethostname()
        self._node: NodeRay | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._stopped = StopWatch()
        self._ends, self._ended = 0, 0.0  # of supervisors: how many in a row, and when the last
        self._rest = b""  # of what the supervisor has said
        self._cause: Cause | None = None  # why it has failed
        self._was_up = self._was_complete = False
        log = folder.data_log(f"node-{ray.number}")
        if ray.address is not None:
            self.address, own = ray.address, environment_of(ray.address, address)
        else:
            # Those of the user are for another cluster: a token in RAY_AUTH_TOKEN would be used before the run's own.
            environment = own_environment(environment)
            token = token_of(secret)
            if head is None:
                self._node = NodeRay.start_head(address, ray.number, ray.memory, token, log, environment)
            else:
                self._node = NodeRay.join(head, address, ray.number, ray.memory, token, log, environment)
            self.address, own = self._node.address, self._node.environment
        self.environment = {**environment, **own, START: ray.start}
        if self._node is None:
            self._supervise()

    def look(self) -> Cause | None:
        """Do what has to be done, without waiting. Return why the data plane of this node has failed, if it has."""
        if self._node is not None and select.select([self._node], [], [], 0)[0]:
            try:
                messages = [*self._node.receive()]
            except EOFError:
                return self._failed("the guard of Ray was killed", "`run.restarts` restarts such a run", ExitCode.HANG)
            for message in messages:
                if "failed" in message:
                    code = ExitCode.HANG if self._was_up else ExitCode.PREFLIGHT
                    log = self._folder.data_log(f"node-{self._ray.number}")
                    return self._failed(f"Ray cannot be started: {message['failed']}", f"{log} has more", code)
                if "up" in message:
                    self._was_up = True
                    if self._supervisor is not None:  # Ray was started again, and knows nothing of its actors
                        self._end_supervisor(seconds=0.0)
                    self._supervise()
        return self._look_at_supervisor()

    def close(self) -> None:
        """End the supervisor and Ray."""
        if self._supervisor is not None:  # in a cluster that stays, it ends its actors first
            self._end_supervisor(_END_S if self._node is None else 0.0)
        if self._node is not None:
            self._node.end()

    def _look_at_supervisor(self) -> Cause | None:
        """Start the supervisor again if it has ended, or is stopped; return why the run cannot go on, if it cannot."""
        if self._supervisor is None:
            if self._ends and time.monotonic() - self._ended > _AGAIN_S:
                self._supervise()
            return None
        has_ended = _has_ended(self._supervisor.pid)
        for message in self._heard():
            if message:
                self._cause = Cause.of_json(message)
            else:
                self._was_complete, self._ends = True, 0
        if not has_ended:
            if self._stopped.note(is_stopped(self._supervisor.pid)):
                self._supervisor.kill()
            return None
        code = self._end_supervisor(seconds=0.0)
        self._ends, self._ended = self._ends + 1, time.monotonic()
        if self._cause is not None and not self._was_complete:
            return self._cause
        # Later, Ray of some host may just be starting again.
        if self._ends < _MOST_ENDS:
            return None
        if self._cause is not None:
            return replace(self._cause, code=ExitCode.HANG)
        what = f"the supervisor of the data plane has ended {_MOST_ENDS} times, the last time with code {code}"
        return self._failed(what, f"{self._folder.data_log('supervisor')} has more", ExitCode.HANG)

    def _heard(self) -> list[Mapping[str, Any]]:
        """Return what the supervisor has said since the last call."""
        assert self._supervisor is not None and self._supervisor.stdout is not None
        *lines, self._rest = (self._rest + (self._supervisor.stdout.read() or b"")).split(b"\n")
        return [*map(parse_line, lines)]

    def _supervise(self) -> None:
        """Start the supervisor, on the first node."""
        if self._ray.number:
            return
        with append(self._folder.data_log("supervisor")) as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-m", "engine.remote"],
                bufsize=0,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                # A system call. In a cluster that stays, the supervisor notices the end itself, to end its actors.
                preexec_fn=end_with_parent if self._node is not None else None,
            )
        assert self._supervisor.stdin is not None and self._supervisor.stdout is not None
        os.set_blocking(self._supervisor.stdout.fileno(), False)
        self._stopped, self._rest, self._cause = StopWatch(), b"", None
        plane = Plane(str(self._folder.root), self._ray.hosts)
        with suppress(BrokenPipeError):  # it has ended already
            self._supervisor.stdin.write(plane.to_json().encode() + b"\n")

    def _end_supervisor(self, seconds: float) -> int:
        """End the supervisor, and kill what is left after some seconds; return its exit code."""
        supervisor, self._supervisor = self._supervisor, None
        assert supervisor is not None and supervisor.stdin is not None and supervisor.stdout is not None
        supervisor.stdin.close()  # it ends then
        last = time.monotonic() + seconds
        while time.monotonic() < last and not _has_ended(supervisor.pid):
            time.sleep(_LOOK_S)
        os.killpg(supervisor.pid, signal.SIGKILL)
        supervisor.stdout.close()
        return supervisor.wait()

    def _failed(self, what: str, hint: str, code: ExitCode) -> Cause:
        return Cause(code, Problem(f"{what} on {self._host}", hint=hint), whole=True)


def _has_ended(pid: int) -> bool:
    """Return whether a child has ended, and leave it to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def ray_problem(ray: Ray, hosts: int, here: bool, variables: Mapping[str, str]) -> Problem | None:
    """Return the problem that the launcher of a run on `hosts` finds; `here` says if this machine is one of them."""
    from engine.remote.probe import cluster_problem

    if problem := checks.version_problem():
        return problem
    if ray.address is not None:
        return cluster_problem(ray.address, hosts, variables)
    return checks.shared_memory_problem(object_store(ray.memory)) if here else None
