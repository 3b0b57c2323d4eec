"""What Ray on this machine consists of, by /proc: processes of a session, and the ports at which they listen."""

from __future__ import annotations

import ipaddress
import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from engine.remote.node import NodeRay

START_S = 120.0  # most seconds of a start, on a busy machine


def session(leader: int) -> dict[int, str]:
    """The processes of a session that run, by number, with their names."""
    found = dict[int, str]()
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdecimal():
                before, _, after = (folder / "stat").read_text().rpartition(")")
                fields = after.split()
                if int(fields[3]) == leader and fields[0] not in "ZX":
                    found[int(folder.name)] = before.partition("(")[2]
    return found


def listening(pids: Iterator[int] | dict[int, str]) -> set[tuple[str, str]]:
    """The addresses at which processes listen over TCP, each with the name of the process."""
    sockets = dict[str, str]()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                digits = fields[1].partition(":")[0]
                words = b"".join(bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))
                address = ipaddress.ip_address(words)
                sockets[fields[9]] = str(getattr(address, "ipv4_mapped", None) or address)
    found = set[tuple[str, str]]()
    for pid in pids:
        with suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            for handle in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    link = os.readlink(handle)  # noqa: PTH115
                    if link.startswith("socket:[") and (at := sockets.get(link[8:-1])) is not None:
                        found.add((name, at))
    return found


def until(holds: Callable[[], bool], seconds: float = START_S) -> bool:
    """Wait until something holds; return whether it does."""
    last = time.monotonic() + seconds
    while not holds() and time.monotonic() < last:
        time.sleep(0.05)
    return holds()


def said(ray: NodeRay, count: int = 1) -> list[str]:
    """Wait for so many messages of a guard; return their kinds."""
    found = list[str]()
    while len(found) < count:
        assert select.select([ray], [], [], START_S)[0], "the guard says nothing"
        found += [kind for message in ray.receive() for kind in message]
    return found
