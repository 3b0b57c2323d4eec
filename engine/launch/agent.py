"""The agent of a node: starts the ranks of this node, watches them, and tells the launcher how they do.

    python -m engine.launch.agent

It reads messages of the launcher from its standard input, and writes its own to its standard output, which ssh and srun
carry to other hosts:

```
 launcher                                        agent                                       rank
    | <- hello: cpus, port ----------------------- |
    | -- start: ranks, program, environment -----> | starts a process for each rank
    | <- beats: where each rank is, every second - | <- at: step, phase, micro-batch -------- |
    | -- alive: every second --------------------> |
    | -- stop -----------------------------------> | -- stop: save and end ----------------> |
    | -- stacks, if no rank gets on -------------> | -- a signal: write stacks to the log --> |
    | <- ended: rank, code, cause ---------------- |
```
When the launcher is gone or silent, the agent kills its ranks and ends. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from engine.control.link import RANK_LINK, Link
from engine.launch.interface import interface_towards
from engine.run.folder import RunFolder

BEAT_S = 1.0  # between two messages of the agent, and of the launcher
SILENCE_S = 20.0  # without a message, after which the other host is taken for lost
_POLL_S = 0.05
_LAST_BYTES = 4096  # of a log, in which its last line is looked for
_STACKS_S = 2.0
_NOT_STARTED = 127  # the exit code of a shell for a program that cannot be started

# Processes in which a rank compiles kernels. PyTorch starts up to 32 in each rank, with 300 MB of host memory each.
COMPILE_WORKERS = 4


class _Rank:
    """A started rank. It has a session of its own, so that Ctrl-C reaches it only through the launcher."""

    def __init__(self, rank: int, program: list[str], environment: dict[str, str], log: Path) -> None:
        self.rank, self.log = rank, log
        self.logged = log.stat().st_size if log.exists() else 0
        self.at: list[Any] | None = None  # step, phase and micro-batch
        self.since = time.monotonic()
        ours, theirs = socket.socketpair()
        with log.open("ab") as file, theirs:
            self.process = subprocess.Popen(
                program,
                env={**environment, RANK_LINK: str(theirs.fileno())},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        descriptor = ours.detach()
        self.link = Link(descriptor, descriptor)

    def kill(self) -> None:
        """Kill the rank and every process that it started."""
        if self.process.returncode is None:  # else its number may belong to another process by now
            os.killpg(self.process.pid, signal.SIGKILL)

    def ended(self) -> int | None:
        """Return the exit code of the rank if it has ended; then what it started is killed."""
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        self.kill()
        return self.process.wait()

    def write_stacks(self) -> None:
        """Write what the threads of the rank are doing to its log, with py-spy if there is one."""
        if program := shutil.which("py-spy"):
            with self.log.open("ab") as file, suppress(OSError, subprocess.TimeoutExpired):
                asked = [program, "dump", "--pid", str(self.process.pid)]
                if subprocess.run(asked, stdout=file, stderr=file, timeout=_STACKS_S, check=False).returncode == 0:
                    return
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGUSR2)  # faulthandler (engine/trainer/rank.py)

    def stopped(self) -> bool:
        """Return whether a signal has stopped the process."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"


class Agent:
    """The ranks of a node."""

    def __init__(self, launcher: Link) -> None:
        self._launcher = launcher
        self._ranks = dict[int, _Rank]()
        self._selector = selectors.DefaultSelector()
        self._selector.register(launcher, selectors.EVENT_READ)
        self._folder: RunFolder | None = None
        self._heard = self._beaten = time.monotonic()
        self._silence_s = math.inf  # a launcher on this machine may be stopped, by Ctrl-Z; if it ends, that is noticed

    def run(self) -> None:
        """Do what the launcher says, until it is gone."""
        self._launcher.send(hello={"cpus": os.cpu_count() or 1, "port": free_port()})
        while time.monotonic() - self._heard < self._silence_s:
            for key, _ in self._selector.select(_POLL_S):
                if key.fileobj is self._launcher:
                    try:
                        messages = self._launcher.receive()
                    except EOFError:
                        return
                    self._heard = time.monotonic()
                    for message in messages:
                        self._obey(message)
                else:
                    self._listen(key.data)
            self._report()

    def close(self) -> None:
        """Kill all ranks."""
        for rank in self._ranks.values():
            rank.kill()
            rank.process.wait()

    def _obey(self, message: dict[str, Any]) -> None:
        if start := message.get("start"):
            self._start(start)
        if "stop" in message:
            for rank in self._ranks.values():
                with suppress(OSError):  # it has already ended
                    rank.link.send(stop=True)
        if "stacks" in message:
            for rank in self._ranks.values():
                rank.write_stacks()
        if "kill" in message:
            for rank in self._ranks.values():
                rank.kill()

    def _start(self, job: dict[str, Any]) -> None:
        """Start the ranks of a job."""
        self._folder = folder = RunFolder(Path(job["folder"]))
        environment = {**os.environ, **job["environment"]}
        if job["peer"] is not None:
            self._silence_s = SILENCE_S
            if name := interface_towards(job["peer"]):
                for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                    environment.setdefault(variable, name)
        threads = max((os.cpu_count() or 1) // len(job["ranks"]), 1)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(threads, COMPILE_WORKERS)))
        for local, (number, program) in enumerate(job["ranks"]):
            folder.error(number).unlink(missing_ok=True)
            place = {"RANK": str(number), "LOCAL_RANK": str(local)}
            try:
                rank = _Rank(number, program, {**environment, **place}, folder.log(number))
            except OSError as error:
                said = f"{error.filename or program[0]}: {error.strerror}"
                self._launcher.send(ended=number, code=_NOT_STARTED, age=0, cause=None, said=said)
                continue
            self._ranks[number] = rank
            self._selector.register(rank.link, selectors.EVENT_READ, rank)

    def _listen(self, rank: _Rank) -> None:
        """Note where a rank is."""
        try:
            messages = rank.link.receive()
        except EOFError:
            self._selector.unregister(rank.link)
            return
        for message in messages:
            if "at" in message:
                rank.at, rank.since = message["at"], time.monotonic()

    def _report(self) -> None:
        """Tell the launcher which ranks have ended, and each second where the others are."""
        now = time.monotonic()
        for rank in list(self._ranks.values()):
            code = rank.ended()
            if code is not None:
                del self._ranks[rank.rank]
                self._launcher.send(ended=rank.rank, code=code, **self._cause(rank))
        if now - self._beaten >= BEAT_S:
            self._beaten = now
            beats = {rank.rank: [rank.at, now - rank.since, rank.stopped()] for rank in self._ranks.values()}
            self._launcher.send(beats=beats)

    def _cause(self, rank: _Rank) -> dict[str, Any]:
        """Return why a rank has ended: its own cause, how many seconds ago that was, and the last line of its log."""
        assert self._folder is not None
        cause, age = None, 0.0
        with suppress(OSError, ValueError):
            cause = json.loads(self._folder.error(rank.rank).read_text(encoding="utf-8"))
            age = max(0.0, time.time() - cause["time"])
        return {"cause": cause, "age": age, "said": last_line(rank.log, rank.logged)}


def last_line(log: Path, start: int) -> str:
    """Return the last line of a log that is not empty, after byte `start`; an empty text if there is none."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - _LAST_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
        return next(filter(None, reversed(lines)), "")
    return ""


def free_port() -> int:
    """Find a TCP port that is free now; another process may still take it before the ranks do."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Run the agent of this node."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the launcher decides; its end is noticed
        signal.signal(number, signal.SIG_IGN)
    output = os.dup(1)
    os.dup2(2, 1)  # what else is printed must not be among the messages
    agent = Agent(Link(0, output))
    try:
        with suppress(BrokenPipeError):
            agent.run()
    finally:
        agent.close()


if __name__ == "__main__":
    main()
