"""Starts the processes of trackers during a run, and warns once if one fails. Training never waits for them.

Note: [trackers are processes]. A tracker's library may raise, hang in a request, crash, replace signal handlers, or
wait for a network when its process exits. In a thread it could do all of these to the launcher, which has to notice
when ranks fail. A process can be killed. Its queue is metrics.jsonl: nothing is held in memory, and no step is dropped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from engine.config.units import counted
from engine.control.signals import shielded
from engine.files import append
from engine.readers import parse_line
from engine.run.folder import RunFolder
from engine.safe_path import safe_path

PATIENCE_S = 120.0  # without an answer, although there are new steps; opening a connection is included
CLOSING_S = 20.0  # for all trackers to write the last steps when a run ends
_LOOK_S = 0.05
Say = Callable[[str], None]
OnStep = Callable[[Mapping[str, Any]], None]


class Follower:
    """The process of one tracker. Raises OSError if it cannot be started."""

    def __init__(self, folder: RunFolder, name: str) -> None:
        self.name, self.log = name, folder.tracker_log(name)
        command = [sys.executable, "-m", "engine.trackers", str(folder.root.absolute()), name]
        with append(self.log) as log:
            self._process = subprocess.Popen(
                shielded(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **safe_path()},
                start_new_session=True,  # Ctrl-C is for the launcher
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._unread, self._error, self.warned = b"", "", False
        self.step, self._since = 0, time.monotonic()  # the last step that it has, and since when it owes the next

    def problem(self, step: int) -> str | None:
        """Return why it fails, else None. `step` is the last one of the run. Does not wait."""
        code = self._process.poll()
        self._read()
        if code is not None:
            return None if code == 0 else self._error or f"its process ended with code {code}"
        now = time.monotonic()
        if self.step >= step:
            self._since = now
        waited = now - self._since
        return f"it has not answered for {waited:.0f} s" if waited > PATIENCE_S else None

    def _read(self) -> None:
        """Read what the process has reported."""
        with suppress(BlockingIOError):
            while part := os.read(self._stdout.fileno(), 65536):
                self._unread += part
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            report = parse_line(line)
            self._error = report.get("error", self._error)
            self.step, self._since = report.get("step", self.step), time.monotonic()

    def finish(self) -> None:
        """Ask the process to write the last steps and to end."""
        with suppress(BrokenPipeError):
            self._stdin.close()

    def wait(self, until: float) -> str | None:
        """Wait for the end of a process that was asked to end, at most until `time.monotonic()` is `until`.

        Then kills it. Returns why steps may be missing, else None.
        """
        while self._process.poll() is None and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if late := self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # including its child processes
        code = self._process.wait()
        self._read()
        self._stdout.close()
        if late:
            return f"it did not end within {CLOSING_S:.0f} s, and was killed"
        return None if code == 0 else self._error or f"its process ended with code {code}"


@contextmanager
def following(names: Sequence[str], folder: RunFolder, say: Say, on_step: OnStep) -> Iterator[OnStep]:
    """Run the trackers `names` during a run; yield a function to call with the metrics of each finished step.

    The first call starts their processes: then the folder has the config and metrics of this run. Each call also calls
    `on_step`, and warns once of each tracker that fails, with the reason. At the end of the context, all together get
    CLOSING_S seconds to write the last steps.
    """
    followers, last = list[Follower](), None

    def warn(name: str, problem: str, lacks: int = 0) -> None:
        steps = f" and lacks {counted(lacks, 'step')}" if lacks > 0 else ""
        say(f"warning: the tracker {name} fails{steps}: {problem} (details: {folder.tracker_log(name)})")

    # The run's own display comes first, so that a slow start of a tracker does not delay it.
    def followed(line: Mapping[str, Any]) -> None:
        nonlocal last
        on_step(line)
        if last is None:
            for name in dict.fromkeys(names):
                try:
                    followers.append(Follower(folder, name))
                except OSError as error:
                    warn(name, str(error))
        last = int(line["step"])
        for follower in followers:
            if not follower.warned and (problem := follower.problem(last)):
                follower.warned = True
                warn(follower.name, problem, last - follower.step)

    try:
        yield followed
    finally:
        for follower in followers:
            follower.finish()
        until = time.monotonic() + CLOSING_S
        for follower in followers:
            # All have been asked to finish before the first wait, so they share the time.
            known = follower.problem(last or 0)  # then there is no reason to wait again
            late = follower.wait(0.0 if known else until)
            if (problem := known or late) and not follower.warned:
                warn(follower.name, problem, (last or 0) - follower.step)
