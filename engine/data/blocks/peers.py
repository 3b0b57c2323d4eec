"""Questions between hosts about the blocks that each has packed, over authenticated TCP.

```
 planning process of a host                                   planning process of the owner of a block
 Peer.lengths([web:7, ...])   -- "L", blocks ------------->   PeerServer, a thread for each connection
                              <- coming, their lengths ----   waits up to 1 s for web:7, which a loader packs
 Peer.slices([...])           -- "S", ranges ------------->
                              <- coming, their tokens -----
```
Answers have what is packed (`served.py`), and whether more is coming. A thread connects to each Peer, again and again
while it is late: only the first connection, and one answer, are ever waited for.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from engine.control.sockets import Acceptor, connected, listening
from engine.data.blocks.blocks import BlockId, Range, Slice
from engine.data.blocks.known import KnownLengths
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.served import (
    Served,
    ranges_payload,
    received_lengths,
    received_ranges,
    received_slices,
)
from engine.errors import BytescaleError
from engine.readers import parse_line

_WAIT_S = 1.0  # that an answer waits for a block which is being packed
_SILENT_S = 10.0  # without an answer, after which a host is late
_LATE_S = 60.0  # for a block to be packed by its owner
_FIRST_S = 30.0  # for the first connection to a host: its process starts at the same time
_CONNECT_S = 5.0  # for each further one
_PAUSE_S, _LONGEST_S = 10.0, 600.0  # before a host that was late is asked again; doubled until it answers
_RETRY_S = 0.1
_LENGTHS, _SLICES = b"L", b"S"  # the first byte of a question
_DONE, _COMING = b"\0", b"\1"  # the first byte of an answer


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run that do not share a cache, as one of them sees them. Hosts that share one count as one."""

    identity: str  # of the cache of this host
    address: str  # where it listens
    port: int
    secret: bytes = field(repr=False)
    others: Mapping[str, tuple[str, int]]  # where others listen, by the identity of their cache


class PeerServer:
    """Answers other hosts from the blocks of this one. What they need is packed next."""

    def __init__(self, blocks: LocalBlocks, hosts: Hosts) -> None:
        """Begin to listen. Raises OSError."""
        self._blocks, self._served = blocks, Served(blocks)
        # The first rank has bound the port, so that no other program gets it.
        server = listening(hosts.address, hosts.port, reuse_port=True)
        self._acceptor = Acceptor(server, hosts.secret, self._serve)

    def close(self) -> None:
        """Listen no more."""
        self._acceptor.close()

    def _serve(self, descriptor: int) -> None:
        """Answer the questions of one host until it closes the connection."""
        with suppress(EOFError, OSError), Connection(descriptor) as connection:
            while True:
                question = connection.recv_bytes()
                try:
                    answer = self._answer(question[:1], question[1:])
                except (ValueError, TypeError, LookupError, BytescaleError) as error:
                    message = "another host has asked for blocks that are not here: %s"
                    logging.getLogger(__name__).warning(message, error)
                    return
                connection.send_bytes(answer)

    def _answer(self, kind: bytes, payload: bytes) -> bytes:
        if kind == _LENGTHS:
            blocks = [BlockId(source, block) for source, block in parse_line(payload)]
            coming = self._wait_for(blocks[:1])
            return coming + self._served.lengths(blocks)
        ranges = received_ranges(payload)
        coming = self._wait_for(dict.fromkeys(BlockId(one.source, one.block) for one in ranges))
        return coming + self._served.slices(ranges)

    def _wait_for(self, wanted: Iterable[BlockId]) -> bytes:
        """Let loaders pack those of the blocks that are not packed; wait for them, but not for long."""
        missing = [block for block in wanted if not self._blocks.is_packed(block)]
        self._blocks.begin(reversed(missing))  # each is put before the others
        last = time.monotonic() + _WAIT_S
        coming = [block for block in missing if self._blocks.coming(block, max(0.0, last - time.monotonic()))]
        return _COMING if coming else _DONE


class Peer:
    """Another host, which owns blocks. It may be asked in any thread; one question is answered at a time."""

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        """Begin to connect."""
        self._address, self._secret = address, secret
        self._connection: Connection | None = None
        self._met = False  # whether the host has been connected, or late, so that none waits for its first connection
        self._pause_s = 0.0  # before the next attempt to connect
        self._closed = threading.Event()
        self._state = threading.Condition()  # of the above; held while a question is answered
        self._begin()

    @property
    def is_late(self) -> bool:
        """Whether the host is not asked: it has not answered, and is not connected again yet."""
        return self._met and self._connection is None

    def lengths(self, wanted: Sequence[BlockId]) -> dict[BlockId, KnownLengths]:
        """Return the lengths of blocks: of the first one, unless the host is late, and of others that are packed."""
        found, last = dict[BlockId, KnownLengths](), time.monotonic() + _LATE_S
        while wanted[0] not in found and time.monotonic() < last:
            missing = [block for block in wanted if block not in found]
            answer = self._ask(_LENGTHS + json.dumps(missing).encode())
            if answer is None:
                break
            found |= received_lengths(answer[1:])
            if answer[:1] == _DONE:
                break
        return found

    def slices(self, wanted: Sequence[Range]) -> list[Slice | None]:
        """Return the tokens of ranges; None for those that the host cannot give, or if it is late."""
        found, last = dict[int, Slice](), time.monotonic() + _LATE_S
        while len(found) < len(wanted) and time.monotonic() < last:
            missing = [number for number in range(len(wanted)) if number not in found]
            answer = self._ask(_SLICES + ranges_payload([wanted[number] for number in missing]))
            if answer is None:
                break
            slices = zip(missing, received_slices(answer[1:]), strict=True)
            found |= {number: one for number, one in slices if one is not None}
            if answer[:1] == _DONE:
                break
        return [found.get(number) for number in range(len(wanted))]

    def close(self) -> None:
        """Close the connection."""
        self._closed.set()
        with self._state:
            self._disconnect()
            self._met = True  # none waits for the first connection any more
            self._state.notify_all()

    def _ask(self, question: bytes) -> bytes | None:
        """Return the answer to a question; None if the host is late: it does not answer, or cannot be reached."""
        with self._state:
            self._state.wait_for(lambda: self._met)
            if self._connection is None:
                return None
            try:
                self._connection.send_bytes(question)
                answer = self._connection.recv_bytes()
            except (OSError, EOFError) as error:
                self._lose(error)
                self._begin()
                return None
            self._pause_s = 0.0
            return answer

    def _begin(self) -> None:
        threading.Thread(target=self._connect, name="peer", daemon=True).start()

    def _connect(self) -> None:
        """Connect to the host, however long it takes. Runs in a separate thread."""
        last = time.monotonic() + _FIRST_S
        while not self._closed.wait(self._pause_s):
            limit_s = _CONNECT_S if self._met else max(_RETRY_S, last - time.monotonic())
            try:
                descriptor = connected(*self._address, self._secret, limit_s)
            except OSError as error:
                if self._met or time.monotonic() > last:
                    self._lose(error)
                else:
                    self._pause_s = _RETRY_S
                continue
            with socket.socket(fileno=socket.dup(descriptor)) as found:
                found.settimeout(None)
                limit = struct.pack("ll", int(_SILENT_S), 0)
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    found.setsockopt(socket.SOL_SOCKET, option, limit)
            with self._state:
                self._connection, self._met = Connection(descriptor), True
                self._state.notify_all()
                if self._closed.is_set():
                    self._disconnect()
            return

    def _lose(self, error: OSError | EOFError) -> None:
        """Ask the host no more until it is connected again, after a pause. It doubles until the host answers."""
        with self._state:
            was_late = self.is_late
            self._disconnect()
            self._met, self._pause_s = True, min(_LONGEST_S, max(_PAUSE_S, 2 * self._pause_s))
            self._state.notify_all()
        if not was_late:
            why = error.strerror if isinstance(error, OSError) else "it has ended"
            if isinstance(error, BlockingIOError):  # of a socket with a limit
                why = f"for {_SILENT_S:g} s"
            place = "{}:{}".format(*self._address)
            message = "the process of %s that shares blocks does not answer (%s); they are packed here meanwhile"
            logging.getLogger(__name__).warning(message, place, why or error)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
