"""A node's place in the tree of agents: passes operations and questions of ranks up, and their results down.

Operations are those of reduction.py, questions those of keys.py.
"""

from __future__ import annotations

import selectors
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from engine.control.keys import Keys
from engine.control.link import Link
from engine.control.protocol import Answer, Ask, Message, Reduce, Result, line_of
from engine.control.reduction import COLLECT, SHARE, Operation, Reduction
from engine.control.sockets import Listener


class Branch:
    """The ranks and child agents of a node, and its parent. It is readable, for a selector, when `work` has work.

    It never waits for another end: what one does not take is kept until it does. So a rank that is stopped delays
    only those who need its values, and no two agents can wait for each other to read.
    """

    def __init__(
        self, ranks: int, children: int = 0, parent: Link | None = None, listener: Listener | None = None
    ) -> None:
        """Take the number of ranks and child agents. Children connect to the listener; the root has no parent."""
        self._reduction = Reduction[Link](ranks + children)
        self._shared = Reduction[Link](ranks)  # operations of the kind SHARE
        self._keys = Keys[Link]()  # of the root
        self._asked = dict[int, tuple[Link, int]]()  # by own ticket: who waits for the parent's answer, with its ticket
        self._tickets = 0
        self._rank_0: Link | None = None  # at the root, once it has joined a COLLECT
        self._missing = children  # that have not connected yet
        self._parent, self._listener = parent, listener
        self._selector = selectors.EpollSelector()
        self._events = dict[Link, int]()  # that the selector waits for
        self._agents = list[Link]()
        self._reading = set[Link]()  # the agents that are not gone; ranks are read from by the caller of `take`
        if parent is not None:
            self._join(parent)
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        """The file descriptor that is readable while there is work."""
        return self._selector.fileno()

    def take(self, member: Link, message: Message) -> None:
        """Take an operation or a question about keys of a rank or child agent. Other messages are ignored."""
        match message:
            case Reduce(operation) if operation.kind == SHARE:
                if (whole := self._shared.add(member, operation)) is not None:
                    self._send(self._shared.answered(whole.name), Result(whole))
            case Reduce(operation):
                if operation.kind == COLLECT and self._parent is None and "0" in operation.value:
                    self._rank_0 = member
                whole = self._reduction.add(member, operation)
                if whole is None:
                    return
                if self._parent is None:
                    self._answer(whole)
                else:
                    self._send([self._parent], Reduce(whole))
                    if whole.kind == COLLECT:  # no result comes back
                        self._reduction.answered(whole.name)
            case Ask(ticket, question, arguments):
                if self._parent is None:
                    for asker, theirs, answer in self._keys.ask(member, ticket, question, *arguments):
                        self._send([asker], Answer(theirs, answer))
                else:
                    self._tickets += 1
                    self._asked[self._tickets] = member, ticket
                    self._send([self._parent], Ask(self._tickets, question, arguments))

    def work(self) -> None:
        """Take what other agents have sent, and send what could not be sent before, without waiting."""
        for key, events in self._selector.select(0):
            found: Any = key.fileobj
            if found is self._listener:
                self._admit()
                continue
            if events & selectors.EVENT_WRITE:
                self._send([found])
            if events & selectors.EVENT_READ:
                self._read(found)

    def forget(self, rank: Link) -> None:
        """Let go of the link of a rank that has ended, before it is closed."""
        self._watch(rank)

    def close(self) -> None:
        """Close the links to other agents."""
        for link in self._agents:
            link.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()

    def _admit(self) -> None:
        """Add the child agents that have connected. When all have, no other may."""
        assert self._listener is not None
        for link in self._listener.links():
            self._join(link)
            self._missing -= 1
        if self._missing <= 0:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None

    def _join(self, agent: Link) -> None:
        self._agents.append(agent)
        self._reading.add(agent)
        self._watch(agent)

    def _read(self, agent: Link) -> None:
        try:
            messages = agent.receive()
        except EOFError:  # the launcher notices it too, and ends the run
            self._reading.discard(agent)
            self._watch(agent)
            return
        for message in messages:
            if agent is not self._parent:
                self.take(agent, message)
                continue
            match message:
                case Result(operation):
                    self._answer(operation)
                case Answer(ticket, value):
                    asker, theirs = self._asked.pop(ticket)
                    self._send([asker], Answer(theirs, value))

    def _answer(self, operation: Operation) -> None:
        members = self._reduction.answered(operation.name)
        if operation.kind == COLLECT and self._rank_0 is not None:  # others wait for no result
            members = {self._rank_0}
        self._send(members, Result(operation))

    def _send(self, links: Iterable[Link], message: Message | None = None) -> None:
        """Send a message to each link; without a message, buffered data."""
        line = line_of(message) if message else b""
        for link in links:
            sent = True
            with suppress(OSError):  # the other end is gone, which its reader notices
                link.unblock()
                sent = link.write(line)
            self._watch(link, unsent=not sent)

    def _watch(self, link: Link, unsent: bool = False) -> None:
        """Let `work` continue when a link with something unsent can be written to, or there is something to read."""
        reads = selectors.EVENT_READ if link in self._reading else 0
        events, before = reads | (selectors.EVENT_WRITE if unsent else 0), self._events.pop(link, 0)
        if events:
            self._events[link] = events
        if events and before and events != before:
            self._selector.modify(link, events)
        elif events and not before:
            self._selector.register(link, events)
        elif before and not events:
            self._selector.unregister(link)
