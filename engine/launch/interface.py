"""Finds the network interface over which this host reaches another one.

gloo advertises the address that the host's own name resolves to, which on Debian is 127.0.1.1, so that other hosts
connect to themselves. With the name of the interface, gloo and NCCL advertise its address.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915  # asks Linux for the IPv4 address of an interface (netdevice(7))
_ANY_PORT = 9


def address_towards(host: str) -> str | None:
    """Return this host's address on the route to `host`, IPv4 if it has one; None if there is no route, or loopback."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _ANY_PORT))  # sends nothing
            address = str(probe.getsockname()[0])
            return None if address.startswith("127.") or address == "::1" else address
    return None


def interface_towards(host: str) -> str | None:
    """Return the interface that has the address `address_towards(host)`; None if there is none, or it is not IPv4."""
    address = address_towards(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
