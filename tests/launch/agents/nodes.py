"""Nodes whose ranks are small programs, started by a real agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from engine.control.link import Link
from engine.launch.agents.commands import NodeCommand
from engine.run.folder import RunFolder

AGENT = (sys.executable, "-m", "engine.launch.agents.agent")

# Reports a place, and waits until it is asked to stop. Ends as a rank that has saved.
WAITS = """
import sys, time
from engine.control.link import Link
link = Link.to_agent()
while not any("stop" in message for message in link.receive()):
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


def job(
    folder: RunFolder, *programs: str, first: int = 0, peer: str | None = None, alone: bool = True
) -> dict[str, object]:
    """The job of a node, by default the only one, whose ranks, from `first` on, run Python programs."""
    ranks = [[rank, [sys.executable, "-c", program]] for rank, program in enumerate(programs, start=first)]
    return {"folder": str(folder.root), "ranks": ranks, "environment": {}, "peer": peer, "alone": alone}


def node(
    folder: RunFolder, *programs: str, host: str = "localhost", first: int = 0, start: tuple[str, ...] = AGENT
) -> NodeCommand:
    """A node whose agent `start` starts."""
    return NodeCommand(host, start, {}, job(folder, *programs, first=first))


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
        self.said = list[dict[str, object]]()

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

    def until(self, name: str) -> dict[str, object]:
        """Wait for the next message that has a name."""
        while True:
            for number, message in enumerate(self.said):
                if name in message:
                    del self.said[: number + 1]
                    return message
            self.said += self.link.receive()
