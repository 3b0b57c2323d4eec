"""The ports of processes: where they listen, and their connections."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_LISTEN = "0A"


def listening(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the addresses at which processes listen for TCP connections, each in the network namespace of its own."""
    return {address for address, state in _sockets(processes) if state == _LISTEN}


def connected(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the own addresses of the TCP connections of processes."""
    return {address for address, state in _sockets(processes) if state != _LISTEN}


def _sockets(processes: Iterable[psutil.Process]) -> Iterable[tuple[str, str]]:
    """Yield the own address and the state of each TCP socket."""
    for process in processes:
        with suppress(OSError):  # it has ended
            place = Path(f"/proc/{process.pid}")
            inodes = {f"{entry.readlink()}" for entry in (place / "fd").iterdir() if _is_socket(entry)}
            for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
                for line in (place / "net" / name).read_text(encoding="ascii").splitlines()[1:]:
                    words = line.split()
                    if f"socket:[{words[9]}]" in inodes:
                        yield _address(words[1].partition(":")[0], family), words[3]


def _is_socket(entry: Path) -> bool:
    try:
        return str(entry.readlink()).startswith("socket:")
    except OSError:
        return False


def _address(text: str, family: socket.AddressFamily) -> str:
    """Decode an address of /proc/net/tcp: words of 32 bits in the order of this machine."""
    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
