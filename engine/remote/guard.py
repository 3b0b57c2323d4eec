"""Keeps Ray running on a node, and ends all of it: `python -m engine.remote.guard < SETTINGS`, which an agent starts.

```
 agent ----- standard input: its end ends Ray ----> guard ----> start.py, which ends    ----> gcs_server, raylet
       <---- {"up": true} or {"failed": why} ------                                            raylet ----> actors
```
All processes of Ray are below the guard, whatever their own parents do: it adopts orphans, kills them one generation
after the other, and removes the folder of the node. So nothing is left when the agent is killed, or ends. If the guard
itself is killed, the agent, which adopts orphans too, kills what was below it.

When Ray's own processes die, the guard starts them again. A head forgets everything then, so nodes whose head has gone
start again, too. Imports no ray.
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
from typing import Any

from engine.control.processes import adopt_orphans, children, continue_without_parent, kill_children
from engine.readers import parse_line
from engine.remote.checks import is_listening
from engine.remote.node import Settings

_LOOK_S = 0.1
_HEAD_S = 60.0  # for the head to listen, at the start and after its death
_HEAD_LOOK_S = 1.0  # between two looks whether the head still listens
_MISSES = 3  # of these looks in a row, after which the head is gone
_ATTEMPTS = 3  # starts in a row that may fail


class _LeftError(Exception):
    """The agent is gone."""


class Guard:
    """Ray on this node."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
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
        """Wait a moment; return whether there is something to read. Raises _LeftError if the agent is gone."""
        readable, _, _ = select.select([0, *waits], [], [], _LOOK_S)
        if 0 in readable and not os.read(0, 1024):
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
        """Wait until one of Ray's processes has ended, or the head is gone; return which one."""
        looked, misses = time.monotonic(), 0
        while True:
            self._look()
            for name, pid in processes.items():
                if pid in self._reaped:
                    return f"Ray's {name} has ended with code {self._reaped[pid]}"
            now = time.monotonic()
            if self._settings.is_head or now - looked < _HEAD_LOOK_S:
                continue
            looked = now
            misses = 0 if is_listening(self._settings.head, self._settings.port) else misses + 1
            if misses == _MISSES:
                return f"the head of Ray at {self._settings.head_address} is gone"


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
    try:
        with suppress(_LeftError):
            Guard(settings).run()
    finally:
        kill_children()
        assert not children()
        shutil.rmtree(settings.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
