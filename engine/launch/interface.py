"""Finds the network interface over which this host reaches another one.

gloo advertises the address that the host's own name resolves to, which on Debian is 127.0.1.1, so that other hosts
connect to themselves. With the name of the interface, gloo and NCCL advertise its address.
"""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # asks Linux for the IPv4 address of an interface (netdevice(7))
_ANY_PORT = 9


def interface_towards(host: str) -> str | None:
    """Return the interface whose IPv4 address the route to `host` has; None if there is no route, or it is loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, _ANY_PORT))  # sends nothing
        except OSError:
            return None
        address = probe.getsockname()[0]
        if address.startswith("127."):
            return None
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # an interface without an IPv4 address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
