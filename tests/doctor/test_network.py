from __future__ import annotations

import socket

import pytest

from engine.doctor import network
from engine.launch.checks import interface

CARDS = ["lo", "eth0", "eth1", "ib0", "docker0"]


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(CARDS)))
    monkeypatch.setattr(interface, "addresses_of", lambda name: [] if name == "docker0" else ["10.0.0.1"])


@pytest.mark.parametrize(
    ("variable", "wanted", "fits"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0,eth7", False),
        ("GLOO_SOCKET_IFNAME", "^lo", False),  # the syntax of NCCL
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "ens,ib", True),
        ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "ens", False),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", True),
        ("NCCL_SOCKET_IFNAME", "^lo,eth,ib,docker", False),
        ("NCCL_SOCKET_IFNAME", "^=eth0", True),
        ("GLOO_SOCKET_IFNAME", "docker0", False),
        ("NCCL_SOCKET_IFNAME", "docker", False),
    ],
)
def test_names_of_interfaces(variable: str, wanted: str, fits: bool) -> None:
    found = network.interfaces({variable: wanted}, [])
    assert found.state == ("ok" if fits else "failed")
    if not fits:
        why = "names docker0, which has no" if wanted.startswith("docker") else "names no interface"
        assert found.message.startswith(f"{variable}={wanted} {why}") and variable in str(found.hint)


def test_a_host_without_a_route_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interface_towards", {"gpu-a": "eth1", "gpu-b": None}.get)
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port: [name])
    found = network.interfaces({}, ["gpu-a", "gpu-b"])
    assert found.state == "failed" and found.message == "there is no route to gpu-b"
    assert network.interfaces({}, ["gpu-a"]).value == "eth1"


def test_a_name_that_does_not_resolve_is_no_fault_of_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of ssh to that host says so."""

    def resolve(name: str, port: None) -> list[str]:
        if name == "gpu-b":
            raise socket.gaierror(-2, "Name or service not known")
        return [name]

    monkeypatch.setattr(network, "interface_towards", {"gpu-a": "eth1"}.get)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert network.interfaces({}, ["gpu-b"]).state == "ok"
    assert network.interfaces({}, ["gpu-b", "gpu-c"]).message == "there is no route to gpu-c"


def test_the_loopback_interface() -> None:
    assert network.loopback().state == "ok"


def test_a_loopback_interface_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*where: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    found = network.loopback()
    assert found.state == "failed" and "Network is unreachable" in found.message


@pytest.mark.parametrize(
    ("address", "state", "value"),
    [
        ("127.0.1.1", "ok", "has a loopback address"),
        ("10.0.0.3", "ok", "has an address"),
        (None, "warning", "does not resolve"),
    ],
)
def test_the_name_of_the_machine(address: str | None, state: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str, *more: object) -> list[tuple[object, ...]]:
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    found = network.host_name(several=True)
    assert (found.state, found.value) == (state, value)
    assert ("agents give gloo" in found.message) == (value == "has a loopback address")
