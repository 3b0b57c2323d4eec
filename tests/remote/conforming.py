"""RayBlocks of hosts that a test gives its sources, as an object of the test's process, which does not import ray.

```
 test      BlocksOfHosts      in its process        OverRay in a process of its own: supervisor, RayBlocks
                              over a pipe                                            actors: TestHost on each host
```
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.data.blocks.blocks import BlockId, Lengths, Range, Slice
from engine.data.blocks.loaders import Loaders
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.served import received_lengths
from engine.data.blocks.texts import Texts
from engine.data.blocks.work import Cost
from engine.data.runtime.process import PlanningProcess
from engine.remote.actor import Role
from engine.remote.caller import Caller
from engine.remote.ray_blocks import RayBlocks
from engine.remote.roles import Packer
from engine.remote.supervisor import Fleet, Supervisor
from engine.remote.view import PLANNER

SPACE, HOSTS, LOADERS = "bytescale-conforming-1", ("host-0", "host-1"), 2
PACKS, HELD = 20, "held"  # blocks that a host packs at most; a source whose blocks take as long as a test wants


class TestHost(Packer):
    """A host whose sources may change. They are its own: it has a cache folder for itself."""

    __test__ = False

    def __init__(self, role: str, epoch: int, caller: Caller, scratch: Path) -> None:
        super().__init__(LocalBlocks({}))
        self._released, self._held = threading.Event(), 0

    def pack(self, block: BlockId) -> tuple[bytes, dict[str, Cost]]:
        if block.source != HELD:
            return super().pack(block)
        self._held += 1
        self._released.wait(60)
        return b"", {}

    def held(self) -> int:
        """How many blocks of that source are being packed."""
        return self._held

    def release(self) -> None:
        self._released.set()

    def open(self, texts: Mapping[str, Texts]) -> None:
        """Take other sources."""
        self.close()
        super().__init__(LocalBlocks(texts, Loaders(LOADERS, 1 << 40)))


class NoPlanner:
    """The planner is the process of the test."""

    def close(self) -> None:
        """It has started nothing."""


class TestRoles:
    """The roles of the tests of blocks."""

    __test__ = False

    def warm(self) -> None:
        """There is nothing to do."""

    @property
    def loaders(self) -> int:
        return PACKS

    def make(self, role: str, epoch: int, caller: Caller, scratch: Path) -> Role:
        return NoPlanner() if role == PLANNER else TestHost(role, epoch, caller, scratch)


class OverRay:
    """RayBlocks, and a supervisor in a thread."""

    def __init__(self) -> None:
        from engine.remote.cluster import RayBoard, RayFleet, connect, open_caller

        connect(SPACE)
        self._caller, self._ended = open_caller(SPACE), False
        self._supervisor = Supervisor(2, 0, 60.0, RayBoard(SPACE), RayFleet(SPACE, TestRoles()), lambda event: None)
        self._supervisor.begin(time.monotonic())
        self._thread = threading.Thread(target=self._supervise)
        self._thread.start()

    def _supervise(self) -> None:
        while not self._ended:
            self._supervisor.turn(time.monotonic())
            time.sleep(0.1)
        self._supervisor.end()

    def open(self, texts: Mapping[str, Texts], caches: Sequence[Path]) -> None:
        for host, cache in zip(HOSTS, caches, strict=True):
            own = {name: Texts(one.place, one.tokens, cache, one.blocks) for name, one in texts.items()}
            self._caller.call(host, "open", own)
        self.blocks = RayBlocks(texts, self._caller, HOSTS, LOADERS * len(HOSTS))

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self.blocks, method)(*arguments)

    def crowded(self) -> int:
        """Read while a host packs as many blocks as it may, and one waits; return how many it packs."""
        packs = [self._caller.start("host-0", "pack", BlockId(HELD, number)) for number in range(PACKS + 1)]
        self._caller.start("host-0", "read", []).result(30)
        last = time.monotonic() + 10
        while (held := self._caller.call("host-0", "held")) < PACKS and time.monotonic() < last:
            time.sleep(0.01)
        self._caller.call("host-0", "release")
        for pack in packs:
            pack.result(30)
        return int(held)

    def late(self) -> tuple[int, int, int]:
        """Stop an actor that no one can kill, until another has its role and has answered; let it go on.

        Returns the epochs of both, and how many late answers were refused.
        """
        fleet, deadline, before = self._supervisor.fleet, self._supervisor.deadline_s, self._caller.refused
        self._supervisor.fleet, self._supervisor.deadline_s = Harmless(fleet), 1.0
        assert received_lengths(self._caller.call("host-0", "lengths", [])) == {}, "it has its role"
        old = self._supervisor.view.members["host-0"]
        os.kill(old.process.pid, signal.SIGSTOP)
        answer = self._caller.start("host-0", "lengths", [])
        assert received_lengths(answer.result(60)) == {}
        assert self._caller.refused == before
        os.kill(old.process.pid, signal.SIGCONT)
        last = time.monotonic() + 10
        while self._caller.refused == before and time.monotonic() < last:
            time.sleep(0.01)
        os.kill(old.process.pid, signal.SIGKILL)
        self._supervisor.fleet, self._supervisor.deadline_s = fleet, deadline
        return old.epoch, self._supervisor.view.members["host-0"].epoch, self._caller.refused - before

    def later(self) -> tuple[bool, bool]:
        """Let a later start look for actors; return whether it finds an actor of this one, and whether that lives."""
        from engine.remote.cluster import RayFleet

        fleet, roles = self._supervisor.fleet, TestRoles()
        earlier = RayFleet("bytescale-others-1", roles)
        actor = earlier.start(0)
        earlier.beat(actor).result(60)
        finds = actor in RayFleet("bytescale-others-2", roles).find()
        assert fleet.find(), "those of other runs live"
        last = time.monotonic() + 10
        while (beat := earlier.beat(actor)).exception(10) is None and time.monotonic() < last:
            time.sleep(0.1)
        return finds, beat.exception() is None

    def close(self) -> None:
        self._ended = True
        self._thread.join()


class Harmless:
    """A fleet whose actors no one can kill: their host cannot be reached."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name) if name != "kill" else lambda *given: None


class BlocksOfHosts:
    """The Blocks of a test; one process is used by several tests."""

    def __init__(self, process: PlanningProcess, texts: Mapping[str, Texts]) -> None:
        self._process, self._lock = process, threading.Lock()
        folder = next(iter(texts.values())).folder
        self.caches = [folder / host for host in HOSTS]
        self._ask(OverRay.open, texts, self.caches)

    def ask(self, wanted: Iterable[BlockId]) -> None:
        self._ask(OverRay.call, "ask", list(wanted))

    def lengths(self, block: BlockId) -> Lengths:
        found: Lengths = self._ask(OverRay.call, "lengths", block)
        return found

    def slices(self, wanted: Sequence[Range]) -> list[Slice]:
        found: list[Slice] = self._ask(OverRay.call, "slices", wanted)
        return found

    def keep(self, wanted: Iterable[BlockId]) -> None:
        self._ask(OverRay.call, "keep", list(wanted))

    def close(self) -> None:
        self._ask(OverRay.call, "close")

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        with self._lock:
            self._process.ask(question, *arguments)
            done, found = self._process.answer()
        if not done:
            raise found
        return found
