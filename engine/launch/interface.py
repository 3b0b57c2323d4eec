"""Finds the network interface over which this host reaches another one.

gloo advertises the address that the host's own name resolves to, which on Debian is 127.0.1.1, so that other hosts
connect to themselves. With the name of the interface, gloo and NCCL advertise its address.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress

from engine.errors import PreflightError

_SIOCGIFADDR = 0x8915  # asks Linux for the IPv4 address of an interface (netdevice(7))
_ANY_PORT = 9
_ANYWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737), so the default route leads to it
_LOOPBACK = "127.0.0.1"


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
    if address is None:
        return None
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def listening_address(environment: Mapping[str, str], peer: str | None) -> str:
    """Return the address at which other hosts connect to this one.

    It is that of the interface that GLOO_SOCKET_IFNAME names, else that on the route to the `peer`, else loopback.
    Where hosts use IPv6, it is always that on the route. Raises PreflightError if the named interface has no address.
    """
    route = address_towards(peer) if peer else None
    if route is not None and ":" in route:
        return route
    return named_address(environment) or route or _LOOPBACK


def own_address(environment: Mapping[str, str]) -> str:
    """Return the IPv4 address by which other hosts reach this one.

    It is that of the interface that GLOO_SOCKET_IFNAME names; else MASTER_ADDR, if it names this host; else that of the
    interface with the default route; else that of the only interface. Raises PreflightError if there is no such one.
    """
    if found := named_address(environment):
        return found
    with suppress(OSError), socket.socket() as probe:
        address = socket.gethostbyname(environment["MASTER_ADDR"]) if environment.get("MASTER_ADDR") else _LOOPBACK
        probe.bind((address, 0))  # fails for the address of another host
        if not address.startswith("127."):  # Debian gives a host's own name such an address
            return address
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((_ANYWHERE, _ANY_PORT))  # sends nothing
        return str(probe.getsockname()[0])
    addresses = [_address_of(name) for _, name in socket.if_nameindex()]
    outside = [address for address in addresses if address is not None and not address.startswith("127.")]
    if len(outside) != 1:
        several = f"has the addresses {', '.join(outside)}" if outside else "has no network interface"
        message = f"{socket.gethostname()} {several} and no default route, so its address for other hosts is unknown"
        raise PreflightError(message, key="GLOO_SOCKET_IFNAME", hint="name the interface over which hosts connect")
    return outside[0]


def named_address(environment: Mapping[str, str]) -> str | None:
    """Return the IPv4 address of the interface that GLOO_SOCKET_IFNAME names; None if it names none.

    Raises PreflightError if that interface has no address.
    """
    name = environment.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if not name:
        return None
    found = _address_of(name)
    if found is None:
        message = f"there is no interface {name} with an IPv4 address on {socket.gethostname()}"
        raise PreflightError(message, key="GLOO_SOCKET_IFNAME", hint="`ip -4 address` lists the interfaces")
    return found


def _address_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(found[20:24])
