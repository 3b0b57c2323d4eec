"""Nodes whose ranks are small programs, started by a real agent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from engine.control.link import Link
from engine.control.protocol import Message, RayNode, Start, Tree, Work
from engine.errors import Problem
from engine.launch.agents.commands import NodeCommand
from engine.launch.agents.ranks import RankError
from engine.run.folder import RunFolder
from tests.refusals import refused

M = TypeVar("M", bound=Message)
AGENT = (sys.executable, "-m", "engine.launch.agents.agent")

# Reports a place, and waits until it is asked to stop. Ends as a rank that has saved.
WAITS = """
import sys, time
from engine.control.link import Link
from engine.control.protocol import Stop
link = Link.to_agent()
while Stop() not in link.receive():
    pass
time.sleep(0.2)
sys.exit(75)
"""

RANK = """
import os, time
from pathlib import Path
from engine.control import progress
from engine.run.folder import RunFolder
from engine.trainer.rank import run_rank

def work(stop, control):
    progress.report("forward", 1, step=3)
    Path({root!r}, "up").touch()
    while not stop():
        time.sleep(0.02)
    Path({root!r}, "saved").touch()
    return 75

raise SystemExit(run_rank(RunFolder(Path({root!r})), work, saves={saves}))
"""


def real_rank(folder: RunFolder, saves: bool = True) -> str:
    """A program with the main function of a real rank, which works until it is asked to stop."""
    return RANK.format(root=str(folder.root), saves=saves)


def walks(folder: RunFolder, steps: int) -> str:
    """A real rank that begins a step each 0.6 s, planned for a second. It stays in the last."""
    begins = "progress.tell_planned(1.0); progress.report('forward', 1, step=step)"
    ends = f"if step < {steps}: progress.report('log')"
    each = f"for step in range(1, {steps + 1}):\n        {begins}; time.sleep(0.6)\n        {ends}"
    return real_rank(folder).replace('progress.report("forward", 1, step=3)', each)


def work(
    folder: RunFolder,
    *programs: str,
    first: int = 0,
    peer: str | None = None,
    alone: bool = True,
    environment: Mapping[str, str] = MappingProxyType({}),
    ray: RayNode | None = None,
) -> Work:
    """The work of a node whose ranks, from `first` on, run Python programs."""
    ranks = [(rank, [sys.executable, "-c", program]) for rank, program in enumerate(programs, start=first)]
    return Work(str(folder.root), ranks, dict(environment), gpus=False, alone=alone, peer=peer, ray=ray)


def start(folder: RunFolder, *programs: str, tree: Tree | None = None, **more: Any) -> Start:
    """The message that starts these programs, by default on the only node; `more` as for `work`."""
    return Start(work(folder, *programs, **more), tree)


def node(
    folder: RunFolder, *programs: str, host: str = "localhost", first: int = 0, start: tuple[str, ...] = AGENT
) -> NodeCommand:
    """A node whose agent `start` starts."""
    return NodeCommand(host, start, {}, work(folder, *programs, first=first))


def failure(folder: RunFolder, rank: int, code: int, host: str = "localhost") -> AbstractContextManager[list[Problem]]:
    """Assert that the block raises a RankError which names this rank, its log and its host, with this exit code."""
    return refused(RankError, folder.log(rank), code=code, rank=rank, host=host)


class Launcher:
    """An agent, and the launcher's end of its link."""

    def __init__(self, stderr: Path) -> None:
        with stderr.open("wb") as file:
            self.process = subprocess.Popen(AGENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.link = Link(os.dup(self.process.stdout.fileno()), os.dup(self.process.stdin.fileno()))
        self.process.stdin.close()
        self.process.stdout.close()
        self._open = True
        self.said = list[Message]()

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *raised: object) -> None:
        self.hang_up()
        self.process.kill()
        self.process.wait()

    def hang_up(self) -> None:
        """End the connection, as a launcher does that ends."""
        if self._open:
            self.link.close()
            self._open = False

    def until(self, kind: type[M]) -> M:
        """Wait for the next message of a kind."""
        while True:
            for number, message in enumerate(self.said):
                if isinstance(message, kind):
                    del self.said[: number + 1]
                    return message
            self.said += self.link.receive()
