"""Checks how ranks of this machine reach each other and other hosts: loopback, the host's name, interfaces."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from engine.config.units import counted
from engine.doctor.check import Check, failed, ok, warning
from engine.launch.checks.interface import INTERFACES, interface_problem, interface_towards, loopback_problem


def loopback() -> Check:
    """Send a byte over a free port on the loopback interface, as ranks of one machine connect."""
    if problem := loopback_problem():
        return failed("loopback", problem.message, problem.hint or "", "broken")
    return ok("loopback", "a connection to a free port works", "works")


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

    Peers whose names do not resolve are left out: the checks of these hosts report it.
    """
    name, present = "interfaces", socket.if_nameindex()
    if problem := interface_problem(variables):
        variable = (problem.key or "").partition("=")[0]
        return failed(name, f"{problem.key} {problem.message}", problem.hint or "", variable)
    routes = {peer: interface_towards(peer) for peer in peers}
    if lost := [peer for peer, found in routes.items() if found is None and _resolves(peer)]:
        message = f"there is no route to {', '.join(lost[:3])}" + (" and others" if len(lost) > 3 else "")
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
