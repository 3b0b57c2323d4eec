"""The board, the wire and the fleet of a data plane on Ray.

```
 board   views, as keys of the head's key-value store that are written once
 wire    calls of named actors; answers are returned, never put, so that they need no owner
 fleet   detached actors: they outlive the supervisor, which finds them by name
```
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.experimental import internal_kv
from ray.util import list_named_actors

from engine.errors import ExitCode, PreflightError, Problem
from engine.remote.actor import Actor, Roles
from engine.remote.caller import Answer, Caller
from engine.remote.checks import address_problem
from engine.remote.plane import ADDRESS, FILES, NODE_ADDRESS, host_resource, of_same_run
from engine.remote.supervisor import Beat
from engine.remote.view import Member, Process, View
from engine.selection import first_line

# Threads of an actor by what they do, so that neither beats nor answers about packed blocks wait for packing.
# `pack` has as many as a host has loaders at most; a block that is read, and may be packed again, is needed now.
_GROUPS = {"beat": 1, "control": 1, "read": 4, "lengths": 4, "build": 2}
_GROUP_OF = {"pack": "pack", "read": "read"} | dict.fromkeys(("step", "validation", "build", "build_sets"), "build")
_KEPT_VIEWS = 8
_CONNECT_S, _AGAIN_S = 120.0, 0.1
_LOOK_S = 0.1  # between two looks whether Ray on this node has died
_HOME = Path(__file__).parent.parent.parent


def connect(namespace: str) -> None:
    """Connect this process to the Ray of the run, as the environment says (plane.py).

    It may be starting, also again, so this waits for it. Raises PreflightError if it does not come up.
    """
    address, last = os.environ[ADDRESS], time.monotonic() + _CONNECT_S
    while True:
        problem = address_problem(address)
        if problem is None:
            try:
                _init(address, namespace)
                return
            except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:  # no node here yet
                ray.shutdown()
                problem = Problem(f"Ray cannot be used: {first_line(error)}", "data.runtime=ray")
        if time.monotonic() > last:
            raise PreflightError.of([problem])
        time.sleep(_AGAIN_S)


def disconnect() -> None:
    """Disconnect this process. Else its exit waits for a Ray that has ended."""
    ray.shutdown()


def _init(address: str, namespace: str) -> None:
    """Connect without taking over the signals of this process, or its working directory."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    where = Path.cwd()
    try:
        # Ray adds the working directory to the import path of all actors: let it be the one with our own packages.
        os.chdir(_HOME)
        ray.init(
            address=address,
            namespace=namespace,
            _node_ip_address=os.environ.get(NODE_ADDRESS),
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.WARNING,
            include_dashboard=False,
        )
    finally:
        os.chdir(where)
        for number, handler in kept.items():  # Ray has set its own
            signal.signal(number, handler)


def open_caller(namespace: str) -> Caller:
    """Make the caller of this process, which is connected to Ray."""
    return Caller(RayBoard(namespace), RayWire(namespace))


def _surroundings(namespace: str) -> tuple[Caller, Path]:
    """Return the caller of an actor, and the folder of this host for its files.

    At the end an actor removes it, if the agent does not remove all of Ray.
    """
    files = Path(os.environ.get(FILES) or _session())
    for other in files.glob("bytescale-*"):
        if other.name != namespace and of_same_run(other.name, namespace):  # files of an earlier start
            shutil.rmtree(other, ignore_errors=True)
    return open_caller(namespace), files / namespace


def _session() -> Path:
    """Return the folder of Ray on this node."""
    return Path(ray._private.worker.global_worker.node.get_session_dir_path())


def end_with_node() -> None:
    """Let this process, which is connected, end when Ray on this node has died: it cannot use the one that follows."""
    path = _session()
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # so that no other one gets its number

    def watch() -> None:
        with suppress(FileNotFoundError):
            while os.path.samestat(os.fstat(folder), path.stat()):
                time.sleep(_LOOK_S)
        logging.getLogger(__name__).warning("Ray on this node has died")
        os._exit(int(ExitCode.HANG))

    threading.Thread(target=watch, daemon=True).start()


class RayBoard:
    """The views of a run in Ray's key-value store. Each version is written once, whoever tries."""

    def __init__(self, namespace: str) -> None:
        self._space = namespace.encode()

    def newest(self, version: int = 0) -> View | None:
        last = max(self._versions(), default=0)
        line = internal_kv._internal_kv_get(_key(last), namespace=self._space) if last > version else None
        return None if line is None else View.of_json(line)

    def publish(self, view: View) -> bool:
        for version in self._versions():
            if version <= view.version - _KEPT_VIEWS:
                internal_kv._internal_kv_del(_key(version), namespace=self._space)
        existed: bool = internal_kv._internal_kv_put(
            _key(view.version), view.to_json(), overwrite=False, namespace=self._space
        )
        return not existed

    def _versions(self) -> list[int]:
        keys = internal_kv._internal_kv_list(b"view-", namespace=self._space)
        return [int(key.removeprefix(b"view-")) for key in keys]


def _key(version: int) -> bytes:
    return f"view-{version}".encode()


class RayWire:
    """Calls of actors."""

    def __init__(self, namespace: str) -> None:
        self._namespace, self._handles = namespace, dict[str, Any]()

    def send(
        self, member: Member, method: str, arguments: tuple[Any, ...], answered: Callable[[Answer | None], None]
    ) -> None:
        try:
            if member.actor not in self._handles:
                self._handles[member.actor] = ray.get_actor(member.actor, namespace=self._namespace)
            work = self._handles[member.actor].answer.options(concurrency_group=_GROUP_OF.get(method, "lengths"))
            future: Future[Answer] = work.remote(member.epoch, method, arguments).future()
        except (ValueError, ray.exceptions.RayError):  # it has ended
            answered(None)
            return
        future.add_done_callback(partial(_answered, answered, member.epoch))


def _answered(answered: Callable[[Answer | None], None], epoch: int, future: Future[Answer]) -> None:
    """Forward the answer of an actor."""
    error = future.exception()
    if error is None:
        answered(Answer(*future.result()))
    elif isinstance(error, ray.exceptions.RayTaskError):  # an error that cannot be pickled, for example
        answered(Answer(epoch, None, error))
    else:
        answered(None)


class RayFleet:
    """The actors of a run."""

    def __init__(self, namespace: str, roles: Roles) -> None:
        self._namespace, self._roles, self._handles = namespace, roles, dict[str, Any]()

    def find(self) -> Mapping[str, int]:
        named = list[str]()
        for one in list_named_actors(all_namespaces=True):
            if one["namespace"] == self._namespace:
                named.append(one["name"])
            elif of_same_run(one["namespace"], self._namespace):  # of an earlier start, whose supervisor was killed
                with suppress(ValueError, ray.exceptions.RayError):
                    ray.kill(ray.get_actor(one["name"], namespace=one["namespace"]))
        for name in named:
            with suppress(ValueError):  # it ends just now
                self._handles[name] = ray.get_actor(name, namespace=self._namespace)
        return {name: int(name.split("-")[1]) for name in named if name in self._handles}

    def start(self, host: int) -> str:
        name = f"host-{host}-{os.urandom(6).hex()}"
        actor = ray.remote(concurrency_groups=_GROUPS | {"pack": self._roles.loaders})(Actor).options(
            name=name,
            namespace=self._namespace,
            lifetime="detached",
            num_cpus=0,
            resources={host_resource(host): 1},
            max_restarts=0,
            max_task_retries=0,
            enable_task_events=False,
        )
        self._handles[name] = actor.remote(self._roles, partial(_surroundings, self._namespace))
        return name

    def beat(self, actor: str) -> Future[Beat]:
        return self._ask(actor, "beat", "beat")

    def become(self, actor: str, role: str, epoch: int) -> Future[None]:
        return self._ask(actor, "become", "control", role, epoch)

    def clean(self, actor: str) -> Future[None]:
        return self._ask(actor, "clean", "control")

    def kill(self, actor: str, process: Process | None, helper: str | None) -> None:
        if process is not None and helper is not None:
            self._ask(helper, "kill", "beat", process)
        with suppress(ValueError, ray.exceptions.RayError):
            ray.kill(self._handles.pop(actor))

    def _ask(self, actor: str, method: str, group: str, *arguments: Any) -> Future[Any]:
        call = getattr(self._handles[actor], method).options(concurrency_group=group)
        found: Future[Any] = call.remote(*arguments).future()
        return found
