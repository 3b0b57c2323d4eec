"""Only ends that know the secret get a link; others get none, and keep nobody waiting."""

from __future__ import annotations

import os
import pickle
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import pytest

from engine.control import sockets
from engine.control.link import Link
from engine.control.protocol import Alive, Hello, Message, line_of
from engine.control.sockets import Listener, connect

SECRET = b"of this run"


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener("127.0.0.1", SECRET) as made:
        yield made


def taken(listener: Listener, count: int = 1) -> list[Link]:
    """Wait for new links, as a selector does."""
    found, last = list[Link](), time.monotonic() + 20
    while len(found) < count and time.monotonic() < last:
        if select.select([listener], [], [], 0.1)[0]:
            found += listener.links()
    return found


def received(link: Link) -> Message:
    while not (messages := link.receive()):
        pass
    (message,) = messages
    return message


def test_messages_go_both_ways(listener: Listener) -> None:
    """Also long after the handshake, whose time limit must not stay on the connection."""
    client = connect("127.0.0.1", listener.port, SECRET)
    (server,) = taken(listener)
    with socket.socket(fileno=client.fileno()) as raw:
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == bytes(16)
        assert os.get_blocking(raw.fileno())
        raw.detach()
    client.send(Hello())
    server.send(Alive())
    assert received(server) == Hello()
    assert received(client) == Alive()
    client.close()
    with pytest.raises(EOFError):
        server.receive()
    server.close()


def test_listener_is_readable_only_while_there_are_new_links(listener: Listener) -> None:
    clients = [connect("127.0.0.1", listener.port, SECRET) for _ in range(3)]
    links = taken(listener, 3)
    assert len(links) == 3
    assert not select.select([listener], [], [], 0.1)[0]
    assert listener.links() == []
    for link in (*clients, *links):
        link.close()


def test_another_secret_is_refused_by_both_ends(listener: Listener) -> None:
    """By the listener, and by an end that asks a listener which does not know the secret."""
    with pytest.raises(PermissionError):
        connect("127.0.0.1", listener.port, b"of another run")
    assert taken_soon(listener) == []
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def welcome_anyone() -> None:
            connection, _ = impostor.accept()
            with Connection(connection.detach()) as ends:
                ends.send_bytes(b"#CHALLENGE#" + bytes(20))
                ends.recv_bytes()
                ends.send_bytes(b"#WELCOME#")
                ends.recv_bytes()
                ends.send_bytes(bytes(16))
                ends.recv_bytes()

        thread = threading.Thread(target=welcome_anyone)
        thread.start()
        with pytest.raises(PermissionError):
            connect("127.0.0.1", impostor.getsockname()[1], SECRET)
        thread.join()


def taken_soon(listener: Listener) -> list[Link]:
    """Return links that come within a moment; for connections that must not become links."""
    select.select([listener], [], [], 0.2)
    return listener.links()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00\x00\x00\x10" + b"x" * 16])
def test_a_stranger_gets_no_link(listener: Listener, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        with suppress(OSError):  # the listener may have closed the connection already
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
        assert taken_soon(listener) == []
    connect("127.0.0.1", listener.port, SECRET).close()  # others still do


def test_ends_that_stall_in_the_handshake_delay_no_other(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are closed after the time limit, here of one second."""
    monkeypatch.setattr(sockets, "_HANDSHAKE_S", 1)
    stalled = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(20)]
    client = connect("127.0.0.1", listener.port, SECRET, seconds=0.9)
    (server,) = taken(listener)
    for one in stalled:
        one.settimeout(10)
        assert one.recv(64)  # the challenge
        assert one.recv(64) == b""
        one.close()
    client.close()
    server.close()


def test_a_listener_that_is_not_one_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may listen at the port of an earlier launch, and say nothing, or something else."""
    monkeypatch.setattr(sockets, "_HANDSHAKE_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        connect("127.0.0.1", silent.getsockname()[1], SECRET)
    with socket.create_server(("127.0.0.1", 0)) as web:

        def speak() -> None:
            with web.accept()[0] as connection:
                connection.sendall(b"\x00\x00\x00\x04HTTP")

        thread = threading.Thread(target=speak)
        thread.start()
        with pytest.raises((ConnectionError, PermissionError)):  # the latter since Python 3.12
            connect("127.0.0.1", web.getsockname()[1], SECRET)
        thread.join()


def test_a_busy_listener_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that say nothing may take all places for a while."""
    monkeypatch.setattr(sockets, "_HANDSHAKE_S", 2)
    monkeypatch.setattr(sockets, "_HANDSHAKES", 1)
    with Listener("127.0.0.1", SECRET) as listener, socket.create_connection(("127.0.0.1", listener.port)) as idle:
        assert idle.recv(64)  # the challenge
        with pytest.raises(ConnectionError, match="closes connections before it responds"):
            connect("127.0.0.1", listener.port, SECRET, seconds=0.1)
        client = connect("127.0.0.1", listener.port, SECRET, seconds=10)
        (server,) = taken(listener)
        client.close()
        server.close()


def test_an_end_that_sends_a_byte_now_and_then_is_given_up(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time limit is that of the handshake, not of each byte."""
    monkeypatch.setattr(sockets, "_HANDSHAKE_S", 1)
    with socket.create_connection(("127.0.0.1", listener.port)) as slow:
        began = time.monotonic()
        slow.recv(64)  # the challenge
        slow.settimeout(0.3)
        for byte in b"\x00\x00\x00\x14" + bytes(16):
            try:
                slow.sendall(bytes([byte]))
                assert slow.recv(64) == b""
                break
            except TimeoutError:  # it still waits
                pass
            except ConnectionError:
                break
        assert time.monotonic() - began < 3


def test_nothing_is_unpickled(listener: Listener) -> None:
    """A pickle is a line that is no message, also from an end that knows the secret."""
    with socket.create_connection(("127.0.0.1", listener.port)) as raw, Connection(raw.fileno()) as ends:
        answer_challenge(ends, SECRET)
        deliver_challenge(ends, SECRET)
        (server,) = taken(listener)
        ends.send_bytes(pickle.dumps(print))
        ends.send_bytes(b"\n" + line_of(Hello()))
        assert received(server) == Hello()
        raw.detach()
    server.close()


def test_a_closed_listener_refuses_and_ends_its_thread(listener: Listener) -> None:
    client = connect("127.0.0.1", listener.port, SECRET)
    assert select.select([listener], [], [], 20)[0]
    listener.close()
    listener.close()
    with pytest.raises(EOFError):  # its link was never taken
        client.receive()
    client.close()
    with pytest.raises(ConnectionRefusedError):
        connect("127.0.0.1", listener.port, SECRET)
    last = time.monotonic() + 20
    while any(thread.name == "listener" for thread in threading.enumerate()) and time.monotonic() < last:
        time.sleep(0.01)
    assert not [thread for thread in threading.enumerate() if thread.name == "listener"]
