"""Links between hosts: TCP connections authenticated at both ends with the run's secret.

The handshake is that of `multiprocessing.connection`: each end answers a random challenge of the other with an HMAC, so
the secret itself never travels. Agents make a connection a Link: lines of JSON, and nothing is ever unpickled.
Connections are not encrypted.
"""

from __future__ import annotations

import hmac
import multiprocessing
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import answer_challenge, deliver_challenge
from types import TracebackType
from typing import Any

from engine.control.link import Link

_HANDSHAKE_S = 5.0  # that a handshake may take
_RETRY_S = 0.05
_LENGTH = struct.Struct("!I")  # of the message of a handshake that follows
_BACKLOG = 1024  # connections that wait to be accepted
_HANDSHAKES = 256  # at once, each in a thread; further connections are closed, and `connect` tries again
# What a handshake raises if the other end has another secret, speaks another protocol, is silent, or is gone. Before
# Python 3.12 `answer_challenge` asserts that the message is a challenge.
_FAILURES = (multiprocessing.AuthenticationError, AssertionError, EOFError, OSError)


class Acceptor:
    """Accepts connections of ends that know the secret, in a thread.

    Each handshake runs in a separate thread, so a stalled peer delays no other.
    """

    def __init__(self, server: socket.socket, secret: bytes, admit: Callable[[int], None]) -> None:
        """Take a socket that listens. `admit` gets the descriptor of each connection, in a thread that it may keep."""
        self._server, self._secret, self._use = server, secret, admit
        self._closed = False
        self._free = threading.BoundedSemaphore(_HANDSHAKES)
        threading.Thread(target=self._accept, name="acceptor", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError):  # wakes the thread, which closing alone does not
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        """Accept connections until this is closed, and start the handshake of each."""
        while not self._closed:
            try:
                connection, _ = self._server.accept()
            except OSError:
                time.sleep(_RETRY_S)  # the other end has given up, or this process has no file descriptor left for now
                continue
            if not self._free.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._admit, args=(connection,), name="handshake", daemon=True).start()

    def _admit(self, connection: socket.socket) -> None:
        """Pass a connection on if its other end knows the secret."""
        try:
            descriptor = _authenticated(connection, self._secret, first=True)
        except _FAILURES:
            return
        finally:
            self._free.release()
        self._use(descriptor)


class Listener:
    """Accepts connections as an Acceptor does. It is readable, for a selector, when there are new links."""

    def __init__(self, host: str, secret: bytes, port: int = 0) -> None:
        """Listen on the interface that has the address `host`; port 0 chooses a free one. Raises OSError."""
        server = listening(host, port)
        self.port = int(server.getsockname()[1])
        self._new, self._closed = list[Link](), False
        self._changing = threading.Lock()  # of the links, and of what makes the listener readable
        self._readable = os.eventfd(0)  # counts the new links
        self._acceptor = Acceptor(server, secret, self._add)

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def fileno(self) -> int:
        """The file descriptor that is readable while there are links that `links` has not returned yet."""
        return self._readable

    def links(self) -> list[Link]:
        """Return the links that are new since the last call, without waiting. The caller closes them."""
        with self._changing:
            found, self._new = self._new, []
            if found:
                os.eventfd_read(self._readable)  # sets it to zero
        return found

    def close(self) -> None:
        """Accept no more connections, and close the links that no caller has taken."""
        with self._changing:
            if self._closed:
                return
            self._closed = True
            links, self._new = self._new, []
        for link in links:
            link.close()
        self._acceptor.close()
        os.close(self._readable)

    def _add(self, descriptor: int) -> None:
        link = Link(descriptor, descriptor)
        with self._changing:
            if not self._closed:
                self._new.append(link)
                os.eventfd_write(self._readable, 1)
                return
        link.close()


def reserved(host: str) -> socket.socket:
    """Return a socket that keeps a port of an address for processes of this user, but does not listen."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    keeps = socket.socket(family, socket.SOCK_STREAM)
    keeps.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    keeps.bind((host, 0))
    return keeps


def listening(host: str, port: int = 0, reuse_port: bool = False) -> socket.socket:
    """Listen on the interface that has the address `host`; port 0 chooses a free one. Raises OSError.

    `reuse_port`: at a port that this user has `reserved`.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=reuse_port)


def derived(secret: bytes, label: str) -> bytes:
    """Return another secret, for another use, from which `secret` does not follow."""
    return hmac.digest(secret, label.encode(), "sha256")


def connect(host: str, port: int, secret: bytes, seconds: float = 20.0) -> Link:
    """Connect to a Listener as `connected` does."""
    descriptor = connected(host, port, secret, seconds)
    return Link(descriptor, descriptor)


def connected(host: str, port: int, secret: bytes, seconds: float = 20.0) -> int:
    """Connect to an Acceptor within some seconds, and return the descriptor of the connection.

    Raises PermissionError if it has another secret, OSError else.

    Connects again while the other end closes the connection, as it does when it is busy with others.
    """
    last = time.monotonic() + seconds
    while True:
        connection = socket.create_connection((host, port), timeout=max(_RETRY_S, last - time.monotonic()))
        try:
            return _authenticated(connection, secret, first=False)
        except multiprocessing.AuthenticationError as error:
            raise PermissionError(f"{host}:{port} has another secret") from error
        except AssertionError as error:
            raise ConnectionError(f"{host}:{port} is not a listener of a run") from error
        except (EOFError, ConnectionError) as error:
            if time.monotonic() + _RETRY_S > last:
                raise ConnectionError(f"{host}:{port} closes connections before it responds") from error
        time.sleep(_RETRY_S)


def _authenticated(connection: socket.socket, secret: bytes, *, first: bool) -> int:
    """Run the handshake on a connection and return its descriptor; the `first` end sends the first challenge.

    Raises one of `_FAILURES`, and then closes the connection.
    """
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # messages are small, and waited for
        ends: Any = _Handshake(connection)
        if first:
            deliver_challenge(ends, secret)
            answer_challenge(ends, secret)
        else:
            answer_challenge(ends, secret)
            deliver_challenge(ends, secret)
        connection.settimeout(None)
        return connection.detach()


class _Handshake:
    """The messages of a handshake, as a `multiprocessing.connection.Connection` has them, all before one deadline.

    The other end may be a stranger that sends a byte now and then.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._last = connection, time.monotonic() + _HANDSHAKE_S

    def send_bytes(self, message: bytes) -> None:
        """Send a message after its length. Raises OSError."""
        self._limit()
        self._connection.sendall(_LENGTH.pack(len(message)) + message)

    def recv_bytes(self, most: int) -> bytes:
        """Return the next message. Raises OSError, also if it is longer than `most` bytes, or EOFError."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > most:
            raise OSError("the message of a handshake is too long")
        return self._read(length)

    def _read(self, length: int) -> bytes:
        found = b""
        while len(found) < length:
            self._limit()
            more = self._connection.recv(length - len(found))
            if not more:
                raise EOFError
            found += more
        return found

    def _limit(self) -> None:
        """Let the next call fail at the deadline."""
        left = self._last - time.monotonic()
        if left <= 0:
            raise TimeoutError("the handshake has taken too long")
        self._connection.settimeout(left)
