"""The agents of all nodes, as the launcher sees them: it starts their ranks and handles their messages."""

from __future__ import annotations

import math
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from engine.control import protocol
from engine.control.clock import AwakeClock
from engine.control.link import BEAT_S, SILENCE_S, Link
from engine.control.processes import StopWatch
from engine.control.protocol import Message, ProtocolError, Tree
from engine.control.reduction import children
from engine.errors import Problem
from engine.launch.agents.commands import NodeCommand
from engine.launch.agents.launchers import Launcher, Loss
from engine.launch.agents.patience import Patience
from engine.run.cause import Cause
from engine.run.folder import RunFolder

POLL_S = 0.05
_MANY = 256  # nodes, above which all of them are looked at each second only: each wakes the launcher once a second


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit code, when, why if it knows, and the last line of its log."""

    code: int
    seen: float  # time.time() of the launcher
    cause: Cause | None
    said: str


@dataclass
class Node:
    """The agent of a node, and its messages so far."""

    number: int
    command: NodeCommand
    log: Path
    link: Link | None = None  # None: it has not been reached yet, or is gone
    heard: float = 0.0  # a time of the clock
    hello: bool = False  # whether it is ready to start ranks
    watches: dict[int, StopWatch] = field(default_factory=dict)  # of ranks

    def send(self, message: Message) -> None:
        if self.link is not None:
            with suppress(OSError):  # it is gone, which is noticed when it is read from
                self.link.send(message)


class Nodes:
    """The agents of all nodes and the ranks that they run."""

    def __init__(
        self,
        commands: Sequence[NodeCommand],
        folder: RunFolder,
        launcher: Launcher,
        paces: Callable[[int, float], None],
    ) -> None:
        self._folder, self._launcher, self._paces = folder, launcher, paces
        self._selector = selectors.DefaultSelector()
        self._clock = AwakeClock()
        self.nodes = [Node(number, command, folder.node_log(number)) for number, command in enumerate(commands)]
        self.ends = dict[int, End]()
        self.hosts = {rank: command.host for command in commands for rank in command.ranks}
        self.patience = Patience(self._clock)
        self._started = set[int]()  # nodes
        self.asked_to_stop = False  # by a scheduler that has signalled an agent
        self._look_s = BEAT_S if len(commands) > _MANY else 0.0
        self._looked = -math.inf
        self.looked = False  # whether the last `look` was at all nodes: if not, neither need the caller
        self._over = threading.Event()
        self._alive = threading.Thread(target=self._say_alive, name="alive", daemon=True)

    def __enter__(self) -> Nodes:
        try:
            self._launcher.start([node.command for node in self.nodes], self._folder)
        except BaseException:
            self.__exit__()
            raise
        self._alive.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """End all ranks, and wait for them."""
        self._over.set()
        if self._alive.ident is not None:
            self._alive.join()
        self._launcher.stop()
        self._selector.close()

    def _say_alive(self) -> None:
        """Tell all agents each second that the launcher is there.

        A thread does, because the main one may wait for a terminal or for the file system of the run folder longer than
        agents wait for the launcher.
        """
        while not self._over.wait(BEAT_S):
            for node in self.nodes:
                link = node.link
                if link is not None and link.writable():
                    node.send(protocol.Alive())

    def tell(self, message: Message) -> None:
        """Send a message to all agents."""
        for node in self.nodes:
            node.send(message)

    def start(self) -> None:
        """Let the agents start the ranks.

        The first agent starts at once, each other one when its parent in the tree of agents listens.
        """
        self._start(0, None)
        while len(self._started) < len(self.nodes) and not any(end.code for end in self.ends.values()):
            self.look(POLL_S)

    def _start(self, number: int, parent: tuple[str, int] | None, ray: str | None = None) -> None:
        """Let an agent start its ranks, and connect to its parent, which is given by address and port, and to Ray."""
        node = self.nodes[number]
        tree = Tree(parent, len(children(number, len(self.nodes))), self._launcher.secret_for(number), ray)
        node.send(protocol.Start(node.command.work, None if len(self.nodes) == 1 else tree))
        self._started.add(number)

    def look(self, seconds: float) -> None:
        """Take what agents say during this time, and note those that have been lost."""
        for number, link in self._launcher.poll():
            node = self.nodes[number]
            node.link, node.heard = link, self._clock()
            self._selector.register(link, selectors.EVENT_READ, node)
        for key, _ in self._selector.select(seconds):
            self._listen(key.data)
        now = self._clock()
        self.looked = now - self._looked >= self._look_s
        if not self.looked:
            return
        self._looked = now
        for node in self.nodes:
            silent = now - node.heard
            if node.link and node.hello and silent > SILENCE_S and not self.has_ended(node):
                self._lose(node, self._launcher.lost(node.number, node.hello, silent))

    def _listen(self, node: Node) -> None:
        assert node.link is not None
        try:
            messages = node.link.receive()
        except EOFError:
            self._lose(node, self._launcher.lost(node.number, node.hello, None))
            return
        except ProtocolError as error:
            (problem, *_) = error.problems
            self._lose(node, Loss(problem.message, error.code, problem.hint or ""))
            return
        node.heard = self._clock()
        for message in messages:
            self._take(node, message)

    def _take(self, node: Node, message: Message) -> None:
        """Record a message of an agent. Messages before its `Hello` are about ranks of an earlier start."""
        match message:
            case protocol.Asked():
                self.asked_to_stop = True
            case protocol.Hello():
                node.hello = True
            case protocol.Listening(address, port, ray) if node.hello:
                for child in children(node.number, len(self.nodes)):
                    self._start(child, (address, port), ray)
            case protocol.Ended(rank, code, cause, age_s, said) if node.hello:
                self.ends.setdefault(rank, End(code, time.time() - age_s, cause, said))
                self.patience.forget(rank)
                node.watches.pop(rank, None)
            case protocol.Beats(ranks) if node.hello:
                now = self._clock()
                for rank, beat in ranks.items():
                    if beat.pace is not None:
                        self._paces(rank, beat.pace)
                    self.patience.note(rank, beat.at, now - beat.age_s, beat.entered)
                    self.patience.expect(rank, beat.planned_s, beat.measured)
                    node.watches.setdefault(rank, StopWatch(self._clock)).note(beat.stopped)

    def has_ended(self, node: Node) -> bool:
        """Return whether all ranks of a node have ended."""
        return all(rank in self.ends for rank in node.command.ranks)

    def _lose(self, node: Node, loss: Loss) -> None:
        """Note that an agent is gone, silent or of another version, and with it its ranks."""
        assert node.link is not None
        self._selector.unregister(node.link)
        node.link = None
        cause = Cause(loss.code, Problem(f"{node.command.host} {loss}", hint=loss.hint), whole=True)
        for rank in node.command.ranks:
            self.ends.setdefault(rank, End(loss.code, time.time(), cause, ""))
            self.patience.forget(rank)
        node.watches.clear()

    def stopped(self) -> int | None:
        """Return a rank that a signal has stopped for some seconds."""
        return next((rank for node in self.nodes for rank, watch in node.watches.items() if watch.expired), None)
