"""Keeps Ray running on a node, and ends all of it: `python -m engine.remote.guard < SETTINGS`, which an agent starts.

```
 agent ----- standard input: its end ends Ray ----> guard ----> start.py, which ends    ----> gcs_server, raylet
       <---- {"up": true} or {"failed": why} ------                                            raylet ----> actors
```
All processes of Ray are below the guard, whatever their own parents do: it adopts orphans, kills them one generation
after the other, and removes the folder of the node. So nothing is left when the agent is killed, or ends. The guard is
two processes, of which one does only this when the other is killed. If both are, the agent does, which adopts orphans
too; so any two of the three may be killed at once.

When Ray's own processes die, or a signal has stopped them for some seconds, the guard starts them again. The head has
what it knows in files, so actors and other nodes stay when its server dies; if the raylet of a node dies, so do the
actors of this node. Imports no ray.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.control.processes import (
    StopWatch,
    adopt_orphans,
    children,
    continue_without_parent,
    is_stopped,
    kill_children,
)
from engine.readers import parse_line
from engine.remote.checks import is_listening
from engine.remote.node import Settings

_LOOK_S = 0.1
_HEAD_S = 60.0  # for the head to listen at the start
_ATTEMPTS = 3  # starts in a row that may fail
_LEAVE_S = 5.0  # for a guard to end everything
_SERVER = "gcs_server"  # Ray's name for that of the head


class _LeftError(Exception):
    """The agent is gone."""


class _Server:
    """The server of the head, which can be started as Ray has started it."""

    def __init__(self, pid: int) -> None:
        place = Path(f"/proc/{pid}")
        self._arguments = (place / "cmdline").read_bytes().split(b"\0")[:-1]
        self._environment = dict(
            one.split(b"=", 1) for one in (place / "environ").read_bytes().split(b"\0") if b"=" in one
        )
        self._outputs = [(place / "fd" / number).readlink() for number in ("1", "2")]
        self.has_listened = True

    def again(self) -> int | None:
        """Start it again, and return its process number; None if it has ended before it listened."""
        if not self.has_listened:
            return None
        self.has_listened = False
        with self._outputs[0].open("ab") as out, self._outputs[1].open("ab") as errors:
            process = subprocess.Popen(
                self._arguments, env=self._environment, stdin=subprocess.DEVNULL, stdout=out, stderr=errors
            )
        process.returncode = 0  # the guard waits for it, as for all others
        return process.pid


class Guard:
    """Ray on this node."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._keeper = settings, os.getppid()
        self._reaped = dict[int, int]()  # statuses of processes that have ended

    def run(self) -> None:
        """Run Ray until the agent is gone, or until it cannot be started."""
        failed = 0
        while failed < _ATTEMPTS:
            try:
                self._await_head()
                processes = self._start()
            except RuntimeError as error:
                failed += 1
                why = str(error)
                print(f"Ray cannot be started: {why}", file=sys.stderr, flush=True)
            else:
                failed = 0
                self._say(up=True)
                why = self._watch(processes)
                print(f"{why}; Ray is started again", file=sys.stderr, flush=True)
                self._say(down=why)
            kill_children()
            self._reaped.clear()
            shutil.rmtree(self._settings.session, ignore_errors=True)
        self._say(failed=why)
        while True:  # the agent ends the ranks
            self._look()

    def _say(self, **message: Any) -> None:
        with suppress(OSError):
            os.write(1, json.dumps(message).encode() + b"\n")

    def _look(self, *waits: Any) -> bool:
        """Wait a moment; return whether there is something to read.

        Raises _LeftError if the agent, or the other process of the guard, is gone.
        """
        readable, _, _ = select.select([0, *waits], [], [], _LOOK_S)
        if os.getppid() != self._keeper or (0 in readable and not os.read(0, 1024)):
            raise _LeftError
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                self._reaped[pid] = os.waitstatus_to_exitcode(status)
        return any(one in readable for one in waits)

    def _await_head(self) -> None:
        """Wait until the head listens. Raises RuntimeError if it does not."""
        settings, last = self._settings, time.monotonic() + _HEAD_S
        while not settings.is_head and not is_listening(settings.head, settings.port):
            if time.monotonic() > last:
                raise RuntimeError(f"the head at {settings.head_address} does not answer")
            self._look()

    def _start(self) -> dict[str, int]:
        """Start Ray; return its processes by name. Raises RuntimeError if that fails."""
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.remote.start"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None and process.stdout is not None
        with process.stdin as settings:
            settings.write(self._settings.to_json().encode() + b"\n")
        with process.stdout as answers:
            while not self._look(answers):
                pass
            said = answers.readline()
        while process.pid not in self._reaped:
            self._look()
        process.returncode = self._reaped.pop(process.pid)
        if not said:
            raise RuntimeError(f"its start ended with code {process.returncode}")
        answer: dict[str, Any] = parse_line(said)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def _watch(self, processes: dict[str, int]) -> str:
        """Wait until one of Ray's processes has ended without which the others cannot go on; return which one."""
        server = _Server(processes[_SERVER]) if _SERVER in processes else None
        watches = {name: StopWatch() for name in processes}
        while True:
            self._look()
            if server is not None and not server.has_listened:
                server.has_listened = is_listening(self._settings.head, self._settings.port)
            for name, pid in processes.items():
                if pid not in self._reaped:
                    if watches[name].note(is_stopped(pid)):
                        os.kill(pid, signal.SIGKILL)
                    continue
                why = f"Ray's {name} has ended with code {self._reaped[pid]}"
                again = server.again() if server is not None and name == _SERVER else None
                if again is None:
                    return why
                print(f"{why}; it is started again", file=sys.stderr, flush=True)
                processes[name], watches[name] = again, StopWatch()


def _guard(settings: Settings) -> None:
    """Guard Ray until the agent is gone; then end all processes below this one."""
    adopt_orphans()
    continue_without_parent()
    try:
        with suppress(_LeftError):
            Guard(settings).run()
    finally:
        kill_children()
        assert not children()
        shutil.rmtree(settings.folder, ignore_errors=True)


def _keep(guard: int, folder: str) -> None:
    """Wait for the other process to end; then end what it has left."""
    agent, last = select.poll(), float("inf")
    agent.register(0, 0)  # tells that the other end is closed
    while os.waitpid(guard, os.WNOHANG)[0] == 0:
        if last < float("inf") or agent.poll(1000 * _LOOK_S):
            last = min(last, time.monotonic() + _LEAVE_S)
            os.kill(guard, signal.SIGCONT if time.monotonic() < last else signal.SIGKILL)  # it may be stopped
            time.sleep(_LOOK_S)
    kill_children()
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Guard Ray until the agent that has started this process is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a scheduler may signal all processes; the agent decides what ends
    adopt_orphans()
    continue_without_parent()  # this process must see that the agent is gone
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 1 << 16)
        if not more:
            return
        line += more
    settings = Settings.of_json(line.decode())
    guard = os.fork()
    if guard == 0:
        _guard(settings)
    else:
        _keep(guard, settings.folder)


if __name__ == "__main__":
    main()
