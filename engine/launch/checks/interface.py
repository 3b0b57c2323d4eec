"""Finds the network interface over which this host reaches another one.

gloo advertises the address that the host's own name resolves to, which on Debian is 127.0.1.1, so that other hosts
connect to themselves. With the name of the interface, gloo and NCCL advertise its address.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from engine.errors import PreflightError, Problem

_SIOCGIFADDR = 0x8915  # asks Linux for the IPv4 address of an interface (netdevice(7))
_ANY_PORT = 9
_ANYWHERE = "192.0.2.1"  # reserved for documentation (RFC 5737), so the default route leads to it
_LOOPBACK = "127.0.0.1"
_ANSWER_S = 5.0
GLOO, NCCL = INTERFACES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"  # variables that name interfaces


def address_towards(host: str) -> str | None:
    """Return this host's address on the route to `host`, IPv4 if it has one; None if there is no route, or loopback."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _ANY_PORT))  # sends nothing
            address = str(probe.getsockname()[0])
            return None if address.startswith("127.") or address == "::1" else address
    return None


def interface_towards(host: str) -> str | None:
    """Return the interface that has the address `address_towards(host)`; None if there is none."""
    address = address_towards(host)
    return None if address is None else _interface_with(address)


def interface_problem(variables: Mapping[str, str]) -> Problem | None:
    """Return the problem if a variable names an interface that this host does not have, or one without an address."""
    present = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACES:
        wanted = variables.get(variable)
        if not wanted:
            continue
        chosen = _chosen(variable, wanted, present)
        if not chosen:
            message = f"names no interface of {socket.gethostname()}, which has {', '.join(present)}"
        elif without := [name for name in chosen if not addresses_of(name)]:
            if variable == NCCL and len(without) < len(chosen):  # NCCL leaves them out
                continue
            message = f"names {', '.join(without)}, which has no IPv4 or IPv6 address on {socket.gethostname()}"
        else:
            continue
        return Problem(message, f"{variable}={wanted}", f"unset {variable}, and each host finds its interface itself")
    return None


def _chosen(variable: str, wanted: str, present: Sequence[str]) -> list[str]:
    """Return the interfaces that a variable chooses; none if one of its names is that of no interface.

    gloo takes names, NCCL prefixes, `=` names and `^` exclusions.
    """
    if variable == GLOO:
        names = wanted.split(",")
        return names if set(names) <= set(present) else []
    names = [name.partition(":")[0] for name in wanted.lstrip("^=").split(",")]
    exact = wanted.lstrip("^").startswith("=")
    named = [one for one in present if any(one == name if exact else one.startswith(name) for name in names)]
    return [one for one in present if one not in named] if wanted.startswith("^") else named


def loopback_problem() -> Problem | None:
    """Return the problem if processes of this host cannot connect to each other, over IPv4 or IPv6."""
    why = "there is no loopback address"
    for family, address in ((socket.AF_INET, _LOOPBACK), (socket.AF_INET6, "::1")):
        try:
            with socket.create_server((address, 0), family=family) as server:
                server.settimeout(_ANSWER_S)
                with socket.create_connection(server.getsockname()[:2], _ANSWER_S) as client:
                    client.sendall(b"1")
                    with server.accept()[0] as taken:
                        taken.settimeout(_ANSWER_S)
                        if taken.recv(1) == b"1":
                            return None
            why = "nothing arrived"
        except OSError as error:
            why = why if family == socket.AF_INET6 else error.strerror or str(error)
    hint = "check that the interface lo is up (`ip link show lo`) and that no firewall blocks it"
    return Problem(f"processes of {socket.gethostname()} cannot connect to each other: {why}", "loopback", hint)


def loopback_interface() -> str | None:
    """Return the interface that leads to this host only; None if there is none that is up."""
    return next(filter(None, map(_interface_with, (_LOOPBACK, "::1"))), None)


def _interface_with(address: str) -> str | None:
    """Return the interface that has an address; None if there is none."""
    return next((name for _, name in socket.if_nameindex() if address in addresses_of(name)), None)


def addresses_of(interface: str) -> list[str]:
    """Return the IPv4 address of an interface, if it has one, and those of IPv6."""
    first, found = _address_of(interface), list[str]()
    with suppress(OSError):  # a kernel without IPv6
        lines = [line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
        found = [str(ipaddress.IPv6Address(int(line[0], 16))) for line in lines if line[-1] == interface]
    return [*([first] if first else []), *found]


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
