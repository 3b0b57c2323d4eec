"""Whether a host can run the data plane on Ray. Ray itself would fail later, in other words, or wait for minutes.

Imports no ray.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from engine.errors import Problem
from engine.remote.plane import TOKEN, TOKEN_PATH

SHARED = Path("/dev/shm")
_CONNECT_S = 5.0
_INSTALL = "pip install ray cryptography"


def version() -> str | None:
    """Return the version of Ray on this host; None if it is not installed."""
    try:
        return metadata.version("ray")
    except metadata.PackageNotFoundError:
        return None


def version_problem(wanted: str | None = None) -> Problem | None:
    """Return the problem if Ray is not installed here, or not in the version that the launcher has."""
    found, host = version(), socket.gethostname()
    if found is None:
        return Problem(f"Ray is not installed on {host}", "data.runtime=ray", f"`{_INSTALL}`, or data.runtime=local")
    if wanted is not None and found != wanted:
        message = f"{host} has Ray {found}, but the launcher has {wanted}, and Ray needs equal versions"
        return Problem(message, "data.runtime=ray", f"`pip install ray=={wanted}` there")
    if not has_certificates():
        message = f"the package cryptography, which makes certificates for Ray, is not installed on {host}"
        return Problem(message, "data.runtime=ray", f"`{_INSTALL}`, or data.runtime=local")
    return None


def has_certificates() -> bool:
    """Return whether this host has the package that makes them."""
    return find_spec("cryptography") is not None


def is_listening(host: str, port: int, seconds: float = _CONNECT_S) -> bool:
    """Return whether a process listens at an address."""
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError:
        return False
    return True


def address_problem(address: str) -> Problem | None:
    """Return the problem if no process listens at HOST:PORT, for which `ray.init` would wait for minutes."""
    host, _, port = address.rpartition(":")
    if is_listening(host.strip("[]"), int(port)):
        return None
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except OSError:
        message = f"{socket.gethostname()} does not know the name {host}"
        return Problem(
            message, f"data.ray.address={address}", "correct it, or use the address of the host of Ray's head"
        )
    message = f"no Ray answers at {address} from {socket.gethostname()}"
    hint = "`ray start --head` prints its address; with data.ray.address=null the run starts its own"
    return Problem(message, f"data.ray.address={address}", hint)


def token_problem(variables: Mapping[str, str]) -> Problem | None:
    """Return the problem if this host has no token for a cluster that the run has not started."""
    path = Path(variables.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
    if variables.get(TOKEN):
        return None
    try:
        said = "is empty" if not path.read_text(encoding="utf-8").strip() else None
    except OSError as error:
        said = f"cannot be read: {error.strerror}"
    if said is None:
        return None
    hint = f"copy the token of the cluster to each host, and name its file in {TOKEN_PATH}"
    return Problem(f"{path}, the token of Ray, {said}", "data.ray.address", hint)


def shared_memory_problem(least: int) -> Problem | None:
    """Return the problem if /dev/shm has less space than Ray's object store needs, in bytes.

    Ray would put its objects on the disk instead.
    """
    try:
        free = shutil.disk_usage(SHARED).free
    except OSError as error:
        return Problem(f"{SHARED} cannot be used: {error.strerror}", "data.runtime=ray", f"mount a tmpfs at {SHARED}")
    if free >= least:
        return None
    from engine.config.units import format_bytes  # imports pydantic, which agents do without

    message = f"{SHARED} of {socket.gethostname()} has {format_bytes(free)} free, but Ray needs {format_bytes(least)}"
    hint = "lower data.ray.memory, remove old files there, or make it larger (docker run --shm-size)"
    return Problem(message, "data.ray.memory", hint)


def own_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment without the user's settings of Ray: they are for another cluster."""
    return {name: value for name, value in environment.items() if not name.startswith("RAY_")}
