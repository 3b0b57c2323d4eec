"""The answers of a host's agent to the doctor's questions (hosts.py). Imports no torch."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.cluster.gpus import visible_gpus
from engine.control.protocol import Answer, Ask, Failed
from engine.doctor import network
from engine.doctor.check import Check, Checks, failed, ok, skipped
from engine.doctor.interconnect import IB_VARIABLES, not_ready, ports
from engine.doctor.limits import CHECKS
from engine.doctor.software import Software
from engine.launch.checks.interface import listening_address
from engine.launch.checks.ready import Need
from engine.selection import first_line

_CONNECT_S = 5.0
_listening = list[socket.socket]()  # open until this process ends


def clock() -> float:
    """Return the time of this host."""
    return time.time()


def software(*extras: str) -> dict[str, Any]:
    """Return the versions on this host, with those of packages that only some configs need."""
    return asdict(Software.here(*extras))


def limits(need: dict[str, Any], variables: dict[str, str], peers: list[str]) -> list[dict[str, Any]]:
    """Check what this host allows, its GPUs, and its interfaces towards `peers`."""
    checks, wanted = Checks(), Need(**need)
    for name, look in CHECKS.items():
        checks.add("", name, look, wanted)
    checks.add("", "GPUs", gpus, wanted)
    checks.add("", "interfaces", network.interfaces, variables, peers)
    return [asdict(check) for check in checks.found]


def network_cards(variables: dict[str, str]) -> dict[str, Any]:
    """Return the ports of this host's network cards, and the variables by which NCCL selects among them."""
    selecting = {name: value for name, value in {**os.environ, **variables}.items() if name in IB_VARIABLES}
    return {"ports": ports(), "variables": selecting}


def gpus(need: Need) -> Check:
    """Check that there is a GPU for each rank of this host."""
    if not need.gpus:
        return skipped("GPUs", "ranks run on CPUs")
    if not_ready():
        return skipped("GPUs", "the driver waits for the fabric manager")
    found = visible_gpus()
    if found < need.ranks:
        hint = "set its slots in the hostfile to that number, or check `nvidia-smi` there"
        return failed("GPUs", f"the hostfile gives it {need.ranks} slots, but CUDA finds {found}", hint, str(found))
    return ok("GPUs", f"CUDA finds {found}", str(found))


def shared(theirs: str, ours: str) -> str:
    """Read a file that the doctor has just written, and write another one for it; return the content that was read."""
    content = Path(theirs).read_text(encoding="utf-8")
    with Path(ours).open("x", encoding="utf-8") as file:  # another user may have put a link there
        file.write(content)
    return content


def listen(variables: dict[str, str], peer: str) -> int:
    """Listen on a free port of the interface towards a `peer`, as agents and ranks do, and return it."""
    address = listening_address(variables, peer)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    _listening.append(socket.create_server((address, 0), family=family))
    return int(_listening[-1].getsockname()[1])


def connect(host: str, port: int) -> float:
    """Connect to a port of the first host, and return the seconds that this took."""
    began = time.perf_counter()
    with socket.create_connection((host, port), _CONNECT_S):
        return time.perf_counter() - began


_QUESTIONS: dict[str, Callable[..., Any]] = {
    one.__name__: one for one in (clock, software, limits, network_cards, shared, listen, connect)
}


def answer(asked: Ask) -> Answer | Failed:
    """Answer a question."""
    try:
        return Answer(asked.ticket, _QUESTIONS[asked.question](*asked.arguments))
    except Exception as error:  # the answer, whatever it is; the other questions follow
        why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        return Failed(asked.ticket, why)
