"""The interface over which a host reaches another. If it fails, gloo connects a host to itself."""

from __future__ import annotations

import socket

import psutil

from engine.launch.interface import address_towards, interface_towards


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
