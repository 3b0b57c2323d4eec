"""The interface over which a host reaches another. If it fails, gloo connects a host to itself."""

from __future__ import annotations

import socket

import psutil
import pytest

from engine.errors import PreflightError
from engine.launch.checks import interface
from engine.launch.checks.interface import address_towards, interface_towards, listening_address, own_address
from tests.refusals import refused


def test_a_route_has_the_interface_with_its_address() -> None:
    """Compared with what psutil says; to an own address, Linux takes loopback, but with that address as the source."""
    own = [
        (name, address.address)
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    ]
    for name, address in own:
        assert interface_towards(address) == name and address_towards(address) == address


def test_loopback_and_unknown_hosts_have_none() -> None:
    assert interface_towards("127.0.0.1") is None
    assert interface_towards("localhost") is None
    assert interface_towards("no-such-host.invalid") is None
    assert interface_towards("::1") is None
    assert address_towards("localhost") is None and address_towards("no-such-host.invalid") is None


def test_the_own_address_is_that_of_the_interface_that_is_named() -> None:
    assert own_address({"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "192.0.2.77"}) == "127.0.0.1"
    with refused(PreflightError, "GLOO_SOCKET_IFNAME"):
        own_address({"GLOO_SOCKET_IFNAME": "eth77"})


def test_other_hosts_connect_at_the_interface_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The route may lead over another one, which a firewall closes."""
    monkeypatch.setattr(interface, "address_towards", {"beta": "10.0.0.7", "gamma": "fd00::7"}.get)
    assert listening_address({"GLOO_SOCKET_IFNAME": "lo"}, "beta") == "127.0.0.1"
    assert listening_address({}, "beta") == "10.0.0.7"
    assert listening_address({"GLOO_SOCKET_IFNAME": "eth77"}, "gamma") == "fd00::7"
    assert listening_address({}, "unreachable") == listening_address({}, None) == "127.0.0.1"
    with refused(PreflightError, "GLOO_SOCKET_IFNAME"):
        listening_address({"GLOO_SOCKET_IFNAME": "eth77"}, "beta")


def test_the_own_address_is_one_that_other_hosts_reach() -> None:
    """A host's own name may be that of loopback, and MASTER_ADDR that of another host."""
    own = {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET
    }
    outside = {address for address in own if not address.startswith("127.")}
    for address in outside:
        assert own_address({"MASTER_ADDR": address}) == address
    routed = own_address({})
    assert routed in own
    for name in ("localhost", "192.0.2.177", "no-such-host.invalid"):
        assert own_address({"MASTER_ADDR": name}) == routed


@pytest.mark.parametrize(
    ("addresses", "found"),
    [
        ({"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": None}, "10.0.0.7"),
        ({"lo": "127.0.0.1"}, None),
        ({"lo": "127.0.0.1", "eth0": "10.0.0.7", "eth1": "10.1.0.7"}, None),
    ],
)
def test_without_a_default_route_the_only_interface_counts(
    monkeypatch: pytest.MonkeyPatch, addresses: dict[str, str | None], found: str | None
) -> None:
    """With loopback, other hosts would connect to themselves."""
    monkeypatch.setattr(interface, "_ANYWHERE", "no-such-host.invalid")
    monkeypatch.setattr(interface, "_address_of", addresses.get)
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(addresses)))
    if found is not None:
        assert own_address({}) == found
        return
    with refused(PreflightError, "GLOO_SOCKET_IFNAME") as problems:
        own_address({})
    outside = [address for name, address in addresses.items() if address and name != "lo"]
    assert all(address in problems[0].message for address in outside)
