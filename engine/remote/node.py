"""Ray on a node of a run, as its agent sees it: started, looked after and ended by a guard (guard.py).

```
 /tmp/bytescale-ray-x1y2z3/     0700: its path is short, because paths of Unix sockets have at most 107 bytes
     token                      0600: the same on all nodes of the run
     authority.pem, node.*      0600: the certificate of this node (certificates.py)
     r/                         sessions of Ray: logs, sockets, objects that /dev/shm cannot hold; new after a restart
     gcs/                       what the head knows; it goes on with it after a restart
     files/                     of actors, which ranks may not have opened yet when Ray dies
```
Ray accepts callers that have a certificate of the run, and its token. It has no dashboard, no jobs API, no
autoscaler, no client server, and sends no statistics. Imports no ray.
"""

from __future__ import annotations

import fcntl
import hmac
import ipaddress
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.control.processes import kill_session
from engine.files import append
from engine.readers import parse_line
from engine.remote import certificates
from engine.remote.checks import own_environment
from engine.remote.plane import ADDRESS, AUTH_MODE, FILES, NODE_ADDRESS, TOKEN_PATH, host_resource
from engine.safe_path import safe_path

if TYPE_CHECKING:
    from engine.config.schema import Data

_FOLDERS, _PREFIX = Path("/tmp"), "bytescale-ray-"  # not TMPDIR, whose path may be long
_LOCK = "lock"  # held as long as the agent or the guard runs
_END_S, _LOOK_S = 10.0, 0.02  # for the guard to end everything
LEAST_STORE = 80 << 20  # bytes; Ray refuses less than 75 MiB
_STORE_SHARE = 4  # of the memory of a node
_MOST_STORE = 4 << 30
# Ray's memory monitor would kill actors on a host that is nearly full, as hosts with offload are. Idle workers would
# take 50 MB each.
_FIXED = {
    AUTH_MODE: "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # Of nodes, by the head: one whose processes have all died is known after 2 s, not 15. One that is only slow has
    # 10 s for each answer.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_failure_threshold": "4",
}
# Without it, Ray replaces a loopback address by that of the default route, on which nothing listens.
_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def object_store(memory: int) -> int:
    """Return the bytes of the object store, of the memory that a node has for Ray. They are in /dev/shm."""
    return max(LEAST_STORE, min(_MOST_STORE, memory // _STORE_SHARE))


def shared_memory(data: Data) -> int:
    """Return the bytes of /dev/shm that the Ray of a run needs on each node; 0 if it starts none."""
    return object_store(data.ray.memory) if data.runtime == "ray" and data.ray.address is None else 0


@dataclass(frozen=True)
class Settings:
    """What Ray on a node is started with."""

    address: str  # of this node, on the interface that Ray uses
    head: str  # the address of the node with the head
    port: int  # of the head
    is_head: bool
    number: int  # of the node in the run
    memory: int  # bytes of the object store and of actors
    folder: str

    @property
    def head_address(self) -> str:
        """Where everything connects: HOST:PORT."""
        return f"[{self.head}]:{self.port}" if ":" in self.head else f"{self.head}:{self.port}"

    @property
    def session(self) -> str:
        """The folder of Ray's sessions."""
        return f"{self.folder}/r"

    @property
    def resource(self) -> str:
        """The resource by which actors are placed on this node."""
        return host_resource(self.number)

    @property
    def object_store(self) -> int:
        """Bytes of the object store."""
        return object_store(self.memory)

    def to_json(self) -> str:
        """Return the line from which the guard and start.py read the settings."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, line: str) -> Settings:
        """Make Settings of that line."""
        return cls(**parse_line(line))


def token_of(secret: bytes) -> str:
    """Return the token of a run, which follows from the secret that its agents share."""
    return hmac.new(secret or secrets.token_bytes(32), b"ray", "sha256").hexdigest()


def environment_of(address: str, node: str) -> dict[str, str]:
    """Return the variables of a process on a node that connects to a Ray which the run has not started.

    Those with its token are the user's.
    """
    host, own = address.rpartition(":")[0], {AUTH_MODE: "token", "RAY_USAGE_STATS_ENABLED": "0"}
    return {**own, **(_LOOPBACK if _is_loopback(host) else {}), ADDRESS: address, NODE_ADDRESS: node}


def free_port(address: str) -> int:
    """Return a port on which nothing listens at an address of this host. Raises OSError if it is another host's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        return int(server.getsockname()[1])


class NodeRay:
    """Ray on this node. It is readable, for a selector, when the guard has said something or has ended."""

    def __init__(self, settings: Settings, guard: subprocess.Popen[bytes], lock: int) -> None:
        self._settings, self._guard, self._lock = settings, guard, lock
        self._rest = b""

    @classmethod
    def start_head(
        cls, address: str, number: int, memory: int, token: str, log: Path, variables: Mapping[str, str] = os.environ
    ) -> NodeRay:
        """Start Ray with the head of the run, which listens on a free port of `address`. Returns at once.

        Processes of Ray, and actors, get `variables`, except those of Ray. Raises OSError if the address is not one of
        this host, or if files cannot be written.
        """
        settings = Settings(address, address, free_port(address), True, number, memory, "")
        return cls._start(settings, token, log, variables)

    @classmethod
    def join(
        cls,
        head: str,
        address: str,
        number: int,
        memory: int,
        token: str,
        log: Path,
        variables: Mapping[str, str] = os.environ,
    ) -> NodeRay:
        """Start Ray as a node of the head at HOST:PORT, for which it waits. Returns at once. Raises OSError."""
        host, _, port = head.rpartition(":")
        settings = Settings(address, host.strip("[]"), int(port), False, number, memory, "")
        return cls._start(settings, token, log, variables)

    @classmethod
    def _start(cls, settings: Settings, token: str, log: Path, variables: Mapping[str, str]) -> NodeRay:
        remove_leftovers()
        # It gets its name when it is locked: another run removes folders of this name that are not.
        draft = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=_FOLDERS))
        lock = os.open(draft / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = draft.rename(draft.with_name(draft.name.removeprefix(".")))
        settings = replace(settings, folder=str(folder))
        try:
            with os.fdopen(os.open(folder / "token", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
                file.write(token)
            certificates.write(folder, settings.address, token)
            with append(log) as errors:
                guard = subprocess.Popen(
                    [sys.executable, "-m", "engine.remote.guard"],
                    bufsize=0,
                    env={**own_environment(variables), **safe_path(), **_variables(settings), **_storage(settings)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    pass_fds=[lock],
                    start_new_session=True,  # Ctrl-C is for the launcher
                )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            raise
        assert guard.stdin is not None
        with suppress(BrokenPipeError):  # it has been killed already
            guard.stdin.write(settings.to_json().encode() + b"\n")
        return cls(settings, guard, lock)

    @property
    def address(self) -> str:
        """The address of the head, HOST:PORT."""
        return self._settings.head_address

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a process that connects to this Ray."""
        return {**_variables(self._settings), ADDRESS: self.address, NODE_ADDRESS: self._settings.address}

    def fileno(self) -> int:
        """The file descriptor that becomes readable when `receive` has something."""
        assert self._guard.stdout is not None
        return self._guard.stdout.fileno()

    def receive(self) -> Iterator[Mapping[str, Any]]:
        """Yield what the guard has said: `up` is true, `down` or `failed` say why. Raises EOFError if it has ended."""
        more = os.read(self.fileno(), 1 << 16)
        if not more:
            raise EOFError
        *lines, self._rest = (self._rest + more).split(b"\n")
        yield from map(parse_line, lines)

    def end(self) -> None:
        """End all processes of this Ray, and remove its folder."""
        assert self._guard.stdin is not None and self._guard.stdout is not None
        with suppress(OSError):
            self._guard.stdin.close()
        last = time.monotonic() + _END_S
        while time.monotonic() < last and not self._has_ended():
            time.sleep(_LOOK_S)
        # The guard was killed, or it is stopped. Until it has been waited for, its number is that of its session.
        kill_session(self._guard.pid)
        self._guard.wait()
        shutil.rmtree(self._settings.folder, ignore_errors=True)
        self._guard.stdout.close()
        os.close(self._lock)

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self._guard.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _variables(settings: Settings) -> dict[str, str]:
    """Return the variables of all processes that use this Ray."""
    loopback = _LOOPBACK if _is_loopback(settings.head) else {}
    own = {TOKEN_PATH: f"{settings.folder}/token", FILES: f"{settings.folder}/files"}
    return {**_FIXED, **loopback, **own, **certificates.variables(settings.folder)}


def _storage(settings: Settings) -> dict[str, str]:
    """Return the variables with which the head keeps what it knows in files, not in memory that dies with it."""
    if not settings.is_head:
        return {}
    return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": f"{settings.folder}/gcs"}


def _is_loopback(host: str) -> bool:
    """Return whether an address, or the name of a host, is that of the loopback interface."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def remove_leftovers() -> None:
    """Remove folders of nodes whose agent and guard were both killed, as by the end of a container's memory."""
    for folder in _FOLDERS.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
