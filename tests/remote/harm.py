"""A run on Ray whose processes are harmed while its ranks take steps."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from engine.control.processes import STOPPED_S
from engine.data.runtime.events import QUEUE, read_events
from engine.data.steps import Cursor
from engine.job import Job
from engine.remote.view import View
from engine.run.folder import RunFolder
from tests.remote import cluster
from tests.remote.cluster import Agents
from tests.remote.trio import DEADLINE_S, Reference, Trio, make_config, prepare, runtimes, state

ROLES = ["planner", "host-0", "host-1"]
# The server of the head (GCS); all processes of Ray on a host, with its actors: on that with the head, and the other.
RAYS = {"head": 0, "node-0": 0, "node-1": 1}
HARMED = ["loader", *ROLES, "supervisor", *RAYS]


class Struck(NamedTuple):
    """What a fault has done."""

    differ: int  # arrays of all ranks
    seen_s: float  # until it was known; 0 for a loader, which is waited for by its host
    longest_s: float  # step until all was as before
    left: int  # processes that are still there, even stopped


class Takeover(NamedTuple):
    """What a planner needed that has taken the role between two checkpoints."""

    differ: int
    since: int  # steps since the checkpoint
    cursor: int  # bytes of its state, which is the cursor that hosts ask for
    lengths: int  # bytes that hosts have sent it: of blocks that are packed
    again: int  # steps that were planned before and that it has planned until it answered


def limit_s(role: str, how: signal.Signals) -> float:
    """Seconds until a fault must be seen. Of Ray's own processes and the supervisor, agents and guards look."""
    if how == signal.SIGKILL:
        return 0.5
    return (STOPPED_S if role in ("head", "supervisor") else DEADLINE_S) + 0.5


@contextmanager
def a_run(folder: Path, *more: str, ray: str | None = None) -> Iterator[Rig]:
    """A run, with its agents and the runtimes of all ranks. It starts a Ray unless there is the address of one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "reference"))
        run = folder / "-".join(["run", *more])
        config = make_config(folder, patch, *more)
        job, made = Job(config), prepare(run, config)
        with cluster.running(made, job, folder, ray) as agents, runtimes(made, job) as trio:
            yield Rig(made, agents, trio, Reference(config))


@dataclass
class Rig:
    """A run, and how far it is."""

    folder: RunFolder
    agents: Agents
    trio: Trio
    reference: Reference
    cursor: Cursor = field(default_factory=Cursor)
    seconds: list[float] = field(default_factory=list)  # of all steps

    def take(self, count: int, requested: bool = False) -> int:
        """Take steps, of which the first may be requested; return how many arrays differ from the reference."""
        bad = 0
        for number in range(count):
            began = time.monotonic()
            if number or not requested:
                self.trio.request(self.cursor)
            found = self.trio.take()
            self.seconds.append(time.monotonic() - began)
            table, plan, after = self.reference.next(self.cursor)
            bad += sum(planned.after != after for planned in found)
            bad += self.reference.differing(self.trio, found, table, plan)
            self.cursor = after
        return bad

    def events(self) -> list[dict[str, Any]]:
        return read_events(self.folder)

    def queues(self) -> list[tuple[float, int, int]]:
        """When the queue of the planner was noted, how many blocks waited, and how many were being packed."""
        return [(one["time"], one["waiting"], one["packing"]) for one in self.events() if one["what"] == QUEUE]

    def state(self, role: str) -> dict[str, int]:
        found: dict[str, int] = self.trio.ask(state, role)
        return found

    def until(self, holds: Callable[[], bool]) -> int:
        """Take steps until something holds; return how many arrays differ."""
        bad, last = 0, time.monotonic() + 200
        while not holds():
            assert time.monotonic() < last
            bad += self.take(1)
        return bad

    def warm(self) -> int:
        """Take steps until all standbys are warm; return how many arrays differ."""
        return self.until(lambda: len(self.trio.actors()) >= len(ROLES) + 2)

    def victims(self, role: str) -> list[psutil.Process]:
        """The processes of a role."""
        if role == "supervisor":
            return [psutil.Process(self.agents.supervisor)]
        if role == "head":
            return [one for one in [self.agents.server()] if one is not None]
        return self.agents.ray(RAYS[role]) if role in RAYS else [psutil.Process(self.trio.pid(role))]

    def harm(self, role: str, how: signal.Signals, moments: int) -> Iterator[Struck]:
        """Harm the processes of a role at random moments of steps, each time when all standbys are warm."""
        drawn = random.Random(f"{role} {how}")
        for _ in range(moments):
            bad = self.warm()
            if role == "loader":
                bad += self.until(lambda: bool(self.trio.loaders()))
            before, events, steps = self.trio.view(), len(self.events()), len(self.seconds)
            victims = self.victims(role)
            self.trio.request(self.cursor)
            time.sleep(drawn.uniform(0, 0.1))
            at, noticed = time.time(), Noticed(self, role, victims)
            for victim in victims:
                with suppress(psutil.NoSuchProcess):
                    victim.send_signal(how)
            bad += self.take(3, requested=True)
            bad += self.until(partial(self._replaced, role, before, noticed))
            _, left = psutil.wait_procs(victims, timeout=10)
            lost = [one["time"] for one in self.events()[events:] if one["what"] == "lost" and self._is_of(one, role)]
            seen = min([*lost, *noticed.at], default=at)
            yield Struck(bad, seen - at, max(self.seconds[steps:]), len(left))

    def take_over(self, since: int) -> Takeover:
        """Let the planner die so many steps after a checkpoint, whose cursor is not needed."""
        bad = self.warm() + self.take(since)
        before = self.trio.view()
        self.victims("planner")[0].kill()
        size = len(json.dumps(self.cursor.to_json()))
        bad += self.take(1)
        found = self.state("planner")
        assert self._replaced("planner", before, None)
        return Takeover(bad, since, size, found["received"], found["planned"] - 1)

    def _replaced(self, role: str, before: View, noticed: Noticed | None) -> bool:
        """Whether all that died have other epochs than in the view before; after a supervisor all have."""
        if noticed is not None and not noticed.done:
            return False
        roles = {"loader": [], "head": [], "supervisor": ROLES, "node-0": ["host-0"], "node-1": ["host-1"]}
        members = self.trio.view().members
        return all(members[name].epoch > before.members[name].epoch for name in roles.get(role, [role]))

    def _is_of(self, event: dict[str, Any], role: str) -> bool:
        return bool(event["role"] == role or (role in RAYS and event["host"] == RAYS[role]))


class Noticed:
    """When a process that is no actor was waited for by whoever has started it, and whether there is another one."""

    def __init__(self, rig: Rig, role: str, victims: list[psutil.Process]) -> None:
        self._rig, self._role = rig, role
        # Of all processes of Ray on a host, the guard looks at this one.
        self._old = next((one for one in victims if one.name() == "raylet"), victims[0])
        self._name, self.at = self._old.name(), list[float]()
        self.done = role != "supervisor" and role not in RAYS
        if not self.done:
            threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while self._old.is_running():
            time.sleep(0.01)
        self.at.append(time.time())
        while not self._is_replaced():
            time.sleep(0.05)
        self.done = True

    def _is_replaced(self) -> bool:
        if self._role == "supervisor":
            return self._rig.agents.supervisor != int(self._old.pid)
        return self._rig.agents.named(self._name, RAYS[self._role]) is not None
