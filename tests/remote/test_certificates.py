"""Certificates of nodes: those of one run accept each other, others are refused."""

from __future__ import annotations

import ssl
import stat
from pathlib import Path

import pytest

from engine.remote import certificates
from engine.remote.certificates import AUTHORITY, CERTIFICATE, KEY

pytest.importorskip("cryptography")


def node(folder: Path, address: str, token: str) -> Path:
    folder.mkdir()
    certificates.write(folder, address, token)
    return folder


def side(folder: Path, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.load_verify_locations(folder / AUTHORITY)
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def meet(server: Path, client: Path, address: str) -> None:
    """Let a client connect to a server at an address. Raises SSLError if one refuses the other."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        side(server, ssl.PROTOCOL_TLS_SERVER).wrap_bio(there, back, server_side=True),
        side(client, ssl.PROTOCOL_TLS_CLIENT).wrap_bio(back, there, server_hostname=address),
    ]
    waiting = list(reversed(ends))
    for _ in range(10):
        for end in list(waiting):
            try:
                end.do_handshake()
                waiting.remove(end)
            except ssl.SSLWantReadError:
                pass
    assert not waiting
    ends[1].write(b"x")
    assert ends[0].read(1) == b"x"


@pytest.mark.parametrize("address", ["192.0.2.7", "2001:db8::7", "node-7"])
def test_nodes_of_a_run_accept_each_other(tmp_path: Path, address: str) -> None:
    one, other = node(tmp_path / "one", address, "token"), node(tmp_path / "other", "192.0.2.8", "token")
    meet(one, other, address)
    meet(other, one, "192.0.2.8")
    meet(one, one, "127.0.0.1")
    for name in (AUTHORITY, CERTIFICATE, KEY):
        assert stat.S_IMODE((one / name).stat().st_mode) == 0o600


def test_others_are_refused(tmp_path: Path) -> None:
    """Nodes of another run, also with the authority of this one, and a node at the address of another."""
    one, other = node(tmp_path / "one", "192.0.2.7", "token"), node(tmp_path / "other", "192.0.2.8", "another")
    for server, client in ((one, other), (other, one)):
        with pytest.raises(ssl.SSLError):
            meet(server, client, "127.0.0.1")
    (other / AUTHORITY).write_bytes((one / AUTHORITY).read_bytes())
    with pytest.raises(ssl.SSLError):
        meet(one, other, "127.0.0.1")
    with pytest.raises(ssl.SSLError):
        meet(one, one, "192.0.2.8")
