"""Carries messages (protocol.py) between the launcher, agents and ranks, over pipes or sockets."""

from __future__ import annotations

import os
import select
import threading

from engine.control.protocol import Message, line_of, message_of

# Environment variables with file descriptors that a rank inherits: of its link to its agent, and of the sockets between
# the first rank of a node and each other one, one after the other.
RANK_LINK, NODE_SOCKETS = "BYTESCALE_LINK", "BYTESCALE_NODE"
BEAT_S = 1.0  # between two messages with which one end shows the other that it is there
SILENCE_S = 20.0  # without a message, after which the other end is taken for lost
_READ_BYTES = 1 << 16


def inherited(name: str) -> list[int]:
    """Return the file descriptors that an environment variable names, once: children of the rank must not use them."""
    descriptors = [int(descriptor) for descriptor in os.environ.pop(name, "").split()]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return descriptors


class Link:
    """One end of a connection. It owns its file descriptors; both may be the same one, of a socket."""

    def __init__(self, reads: int, writes: int) -> None:
        """Take the file descriptors to read from and to write to."""
        self._reads, self._writes = reads, writes
        self._rest = bytearray()  # the beginning of a message
        self._unsent = bytearray()
        self._sending = threading.Lock()

    @classmethod
    def to_agent(cls) -> Link | None:
        """Return the link of this rank to its agent; None if no agent has started it."""
        return next((cls(descriptor, descriptor) for descriptor in inherited(RANK_LINK)), None)

    def fileno(self) -> int:
        """The file descriptor that becomes readable when there are messages."""
        return self._reads

    def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the other end is gone."""
        self.write(line_of(message))

    def write(self, line: bytes = b"") -> bool:
        """Send a message that `line_of` has encoded, after buffered ones. Returns whether all of it has been sent.

        It always has, unless the link is `unblocked`. Raises OSError if the other end is gone.
        """
        with self._sending:
            self._unsent += line
            while self._unsent:
                try:
                    sent = os.write(self._writes, self._unsent)
                except BlockingIOError:
                    return False
                except OSError:
                    self._unsent.clear()
                    raise
                del self._unsent[:sent]
            return True

    def unblock(self) -> None:
        """From now on, buffer what the other end does not read immediately instead of waiting: see `write`."""
        for descriptor in {self._reads, self._writes}:
            os.set_blocking(descriptor, False)

    def writable(self) -> bool:
        """Whether a message of up to 4 KiB can be sent without waiting for the other end to read."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            if self._writes < 0:  # closed
                return False
            poll = select.poll()
            poll.register(self._writes, select.POLLOUT)
            return bool(poll.poll(0))
        finally:
            self._sending.release()

    def receive(self) -> list[Message]:
        """Wait until there is something to read, and return the messages that are complete, which may be none.

        Lines that are not messages are skipped: a remote shell may greet. Raises EOFError if the other end is gone,
        ProtocolError if it sends what this version does not know.
        """
        try:
            found = os.read(self._reads, _READ_BYTES)
        except BlockingIOError:  # of an unblocked link
            return []
        except OSError:  # of a socket, also that its host cannot be reached any more
            found = b""
        if not found:
            raise EOFError
        self._rest += found
        if b"\n" not in found:
            return []
        *lines, self._rest = self._rest.split(b"\n")
        return [message for message in map(message_of, lines) if message is not None]

    def close(self) -> None:
        """Close the file descriptors. To send is an OSError afterwards."""
        with self._sending:
            for descriptor in {self._reads, self._writes}:
                os.close(descriptor)
            self._reads = self._writes = -1  # the numbers may soon be those of other files
