"""A run on Ray whose processes are harmed while its ranks take steps."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from engine.data.runtime.events import QUEUE, read_events
from engine.data.steps import Cursor
from engine.job import Job
from engine.remote.view import View
from engine.run.folder import RunFolder
from tests.remote.trio import Reference, Supervised, Trio, make_config, prepare, runtimes, state, supervisor

ROLES = ["planner", "host-0", "host-1"]
HARMED = ["loader", *ROLES, "supervisor"]


class Struck(NamedTuple):
    """What a fault has done."""

    differ: int  # arrays of all ranks
    seen_s: float  # until the supervisor knew; 0 for a loader and the supervisor itself
    longest_s: float  # step until the role was taken over
    left: bool  # whether the process is still there, even stopped


@contextmanager
def a_run(folder: Path, *more: str) -> Iterator[Rig]:
    """A run on a Ray that runs (cluster.py), with its supervisor and the runtimes of all ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "reference"))
        run = folder / "-".join(["run", *more])
        config = make_config(folder, patch, *more)
        job, made = Job(config), prepare(run, config)
        with supervisor(made, job) as supervised, runtimes(made, job) as trio:
            yield Rig(made, supervised, trio, Reference(config))


@dataclass
class Rig:
    """A run, and how far it is."""

    folder: RunFolder
    supervisor: Supervised
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

    def harm(self, role: str, how: signal.Signals, moments: int) -> Iterator[Struck]:
        """Harm the process that has a role at random moments of steps, each time when all standbys are warm."""
        drawn = random.Random(f"{role} {how}")
        for _ in range(moments):
            bad = self.until(lambda: len(self.trio.actors()) >= len(ROLES) + 2)
            before, events, steps = self.trio.view(), len(self.events()), len(self.seconds)
            victim = psutil.Process(self.supervisor.pid if role == "supervisor" else self.trio.pid(role))
            self.trio.request(self.cursor)
            time.sleep(drawn.uniform(0, 0.1))
            at = time.time()
            os.kill(victim.pid, how)
            if role == "supervisor":
                self.supervisor.again()
            bad += self.take(3, requested=True)
            bad += self.until(lambda view=before: self._replaced(role, view))  # type: ignore[misc]
            _, left = psutil.wait_procs([victim], timeout=10)
            lost = [
                one["time"] - at for one in self.events()[events:] if (one["what"], one.get("role")) == ("lost", role)
            ]
            yield Struck(bad, max(lost, default=0.0), max(self.seconds[steps:]), bool(left))

    def _replaced(self, role: str, before: View) -> bool:
        """Whether the role has another epoch than in the view before; after a supervisor all have."""
        roles = {"loader": [], "supervisor": ROLES}.get(role, [role])
        members = self.trio.view().members
        return all(members[name].epoch > before.members[name].epoch for name in roles)
