"""Checks how ranks of this machine reach each other and other hosts: ports, the host's name, interfaces."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from engine.config.units import counted
from engine.doctor.check import Check, failed, ok, warning
from engine.launch.agent import free_port
from engine.launch.interface import interface_towards

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # variables that name interfaces
_ANSWER_S = 5.0


def port() -> Check:
    """Send a byte over a free port on the loopback interface, as ranks of one machine meet."""
    number = free_port()
    try:
        with socket.create_server(("127.0.0.1", number)) as server:
            server.settimeout(_ANSWER_S)
            with socket.create_connection(("127.0.0.1", number), _ANSWER_S) as client:
                client.sendall(b"1")
                with server.accept()[0] as taken:
                    taken.settimeout(_ANSWER_S)
                    if taken.recv(1) == b"1":
                        return ok("loopback", "a connection to a free port works", "works")
        why = "nothing arrived"
    except OSError as error:
        why = str(error)
    hint = "check that the interface lo is up (`ip link show lo`) and that no firewall blocks it"
    return failed("loopback", f"ranks of this machine cannot connect to each other: {why}", hint, "broken")


def host_name(several: bool) -> Check:
    """Check that this machine's own name has an address; `several` machines train."""
    name = socket.gethostname()
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(name, None, socket.AF_INET)}
    except OSError as error:
        message = (
            f"the name of this machine, {name}, has no address: {error.strerror}; gloo uses the loopback interface"
        )
        return warning("host name", message, f"add a line `127.0.1.1 {name}` to /etc/hosts", "does not resolve")
    if all(str(address).startswith("127.") for address in addresses):
        note = "; agents give gloo the interface to other hosts instead" if several else ""
        return ok("host name", f"{name} has a loopback address{note}", "has a loopback address")
    return ok("host name", f"{name} has the address {', '.join(map(str, sorted(addresses)))}", "has an address")


def interfaces(variables: Mapping[str, str], peers: Sequence[str]) -> Check:
    """Check that variables name interfaces that this machine has, and that it has a route to the hosts `peers`.

    Peers whose names do not resolve are left out: the checks of these hosts say so.
    """
    name, present = "interfaces", [name for _, name in socket.if_nameindex()]
    for variable in INTERFACES:
        wanted = variables.get(variable)
        if wanted and not _matches(variable, wanted, present):
            message = f"{variable}={wanted} names no interface of this machine, which has {', '.join(present)}"
            return failed(name, message, f"unset {variable}, and each host finds its interface itself", variable)
    routes = {peer: interface_towards(peer) for peer in peers}
    if lost := [peer for peer, found in routes.items() if found is None and _resolves(peer)]:
        message = f"there is no IPv4 route to {', '.join(lost[:3])}" + (" and others" if len(lost) > 3 else "")
        hint = "check the route, and that its name has no loopback address in /etc/hosts: `getent hosts NAME`"
        return failed(name, message, hint, "no route")
    used = sorted({found for found in routes.values() if found is not None})
    given = [f"{variable}={variables[variable]}" for variable in INTERFACES if variables.get(variable)]
    if used:
        text = f"{', '.join(used)} reaches the other hosts" + (f"; {', '.join(given)} is set" if given else "")
        return ok(name, text, ", ".join(used))
    return ok(name, f"{counted(len(present), 'interface')}; " + (", ".join(given) or "no variable chooses one"))


def _resolves(host: str) -> bool:
    """Return whether the name of a host has an address, of IPv4 or IPv6."""
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _matches(variable: str, wanted: str, present: Sequence[str]) -> bool:
    """Return whether a variable chooses an interface: gloo takes names, NCCL prefixes, `=` names and `^` exclusions."""
    if variable == "GLOO_SOCKET_IFNAME":
        return all(name in present for name in wanted.split(","))
    names = [name.partition(":")[0] for name in wanted.lstrip("^=").split(",")]
    exact = wanted.lstrip("^").startswith("=")
    chosen = [one for one in present if any(one == name if exact else one.startswith(name) for name in names)]
    return len(chosen) < len(present) if wanted.startswith("^") else bool(chosen)
