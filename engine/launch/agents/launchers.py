"""What a launcher is: it brings the agents of the nodes, says why one is gone, and ends them.

| launcher | agents |
|---|---|
| `Starts` (here) | a subprocess on this machine, ssh to the others |
| `Joins` (launch/schedulers/join.py) | the processes that srun, torchrun or Kubernetes started on the other nodes |
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from engine.cluster.hosts import is_local
from engine.control.link import Link
from engine.control.protocol import Kill
from engine.control.signals import shielded
from engine.errors import ExitCode, PreflightError
from engine.files import append
from engine.launch.agents.commands import NodeCommand
from engine.launch.agents.rank_process import last_line
from engine.launch.checks.ready import allow_many_files
from engine.run.checkpoints import newest_first, step_of
from engine.run.folder import RunFolder

_SSH_FAILED = 255
_GRACE_S = 5.0  # for an agent to end


class Loss(NamedTuple):
    """Why a node has no agent (any more)."""

    what: str  # follows the name of its host
    code: int  # the exit code of the run
    hint: str
    why: str = ""  # how its process has ended, if that is known

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" if self.why else self.what


class Launcher(Protocol):
    """Brings the agents of nodes, which are numbered in the order of their commands."""

    answer_s: float  # that agents may take to answer at the start, after the last one that did

    def start(self, commands: Sequence[NodeCommand], folder: RunFolder) -> None:
        """Begin to start the agents. Raises PreflightError if this machine lacks a prerequisite."""

    def poll(self) -> list[tuple[int, Link]]:
        """Return the nodes whose agents can be reached since the last call, with their links, without waiting."""

    def lost(self, node: int, answered: bool, silent_s: float | None) -> Loss:
        """Say why an agent is gone: its link has ended, or `silent_s` seconds have passed without a message.

        `answered` says whether it has answered before. Its link is not used afterwards.
        """

    def absent(self, node: int) -> Loss:
        """Say what to do about an agent that has not answered."""

    def secret_for(self, node: int) -> str | None:
        """Return the secret with which agents connect to each other, to send to this node.

        None if its agent has it already: a link that others could read must not carry it.
        """

    def stop(self) -> None:
        """End all ranks, and all agents or their work for this start. Called once, whatever has happened."""

    @property
    def restarts(self) -> bool:
        """Whether `start` can be called once more. Not if a node is gone that only a scheduler can start again."""


@dataclass
class _Started:
    """An agent that runs below a process of this machine."""

    host: str
    process: subprocess.Popen[bytes]
    link: Link
    log: Path
    logged: int  # bytes that the log had before


class Starts:
    """Starts the agents: a subprocess on this machine, ssh to others."""

    answer_s = 60.0
    restarts = True

    def __init__(self) -> None:
        self._agents = list[_Started]()
        self._new = list[tuple[int, Link]]()
        self._secret = secrets.token_hex(32)

    def start(self, commands: Sequence[NodeCommand], folder: RunFolder) -> None:
        """Start a process for each agent."""
        allow_many_files()
        self._folder, self._agents, self._new = folder, [], []
        for number, command in enumerate(commands):
            log, program = folder.node_log(number), command.arguments[0]
            if shutil.which(program) is None:
                message = f"{command.host} cannot be reached: {program} is not installed"
                raise PreflightError(message, hint=f"install {program} on this machine")
            with append(log) as file:
                logged = file.tell()
                process = subprocess.Popen(
                    command.arguments if is_local(command.host) else shielded(command.arguments),
                    env={**os.environ, **command.environment},
                    stdin=subprocess.PIPE,  # the agent ends when it closes
                    stdout=subprocess.PIPE,
                    stderr=file,
                    start_new_session=True,  # Ctrl-C reaches it only through the launcher
                )
            assert process.stdin is not None and process.stdout is not None
            link = Link(os.dup(process.stdout.fileno()), os.dup(process.stdin.fileno()))
            process.stdin.close()
            process.stdout.close()
            self._agents.append(_Started(command.host, process, link, log, logged))
            self._new.append((number, link))

    def poll(self) -> list[tuple[int, Link]]:
        """Return the links of all agents once: each is there as soon as its process runs."""
        found, self._new = self._new, []
        return found

    def lost(self, node: int, answered: bool, silent_s: float | None) -> Loss:
        """Say how the process of the agent has ended, with its last words."""
        agent, resume = self._agents[node], how_to_resume(self._folder)
        here = is_local(agent.host)
        if silent_s is not None:
            what = "its agent may be stopped" if here else "it or its network may be down"
            return Loss(f"has not answered for {silent_s:.0f} s", ExitCode.HANG, f"{what}; {resume}")
        try:
            code = agent.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return Loss("closed its connection", ExitCode.HANG, resume)
        name, said = "its agent" if here else "ssh", last_line(agent.log, agent.logged)
        if answered and code < 0:
            return Loss("was lost", 128 - code, resume, f"{name} was killed by {signal.Signals(-code).name}")
        ended = f"{name} ended with code {code}" + (f": {said}" if said else "")
        if answered:
            return Loss("was lost", ExitCode.HANG, resume, ended)
        hint = f"every host needs this folder, the run folder and {sys.executable} under the same paths"
        if code == _SSH_FAILED and not here:
            every = "`bytescale doctor --hostfile FILE` checks every host"
            hint = f"check `ssh {agent.host}`, which must work without a password; {every}"
        return Loss("cannot run ranks", ExitCode.PREFLIGHT, hint, ended)

    def absent(self, node: int) -> Loss:
        """Say that the host does not answer."""
        host = self._agents[node].host
        what = f"has not answered for {self.answer_s:.0f} s"
        return Loss(what, ExitCode.PREFLIGHT, f"check that Python starts on {host}")

    def secret_for(self, node: int) -> str:
        """Return the secret: pipes and ssh keep it to themselves."""
        return self._secret

    def stop(self) -> None:
        """End all agents, which end their ranks, and wait for them."""
        for agent in self._agents:
            with suppress(OSError):
                agent.link.send(Kill())
            agent.link.close()
        last = time.monotonic() + _GRACE_S
        for agent in self._agents:
            with suppress(subprocess.TimeoutExpired):
                agent.process.wait(max(0.0, last - time.monotonic()))
            if agent.process.poll() is None:
                os.killpg(agent.process.pid, signal.SIGKILL)
            agent.process.wait()
        self._agents = []


def how_to_resume(folder: RunFolder) -> str:
    """Return the hint for a run that can continue."""
    if saved := newest_first(folder.checkpoints):
        command = f"bytescale train --resume {shlex.quote(str(folder.root))}"
        return f"`{command}` resumes; the last checkpoint is of step {step_of(saved[0])}"
    return "run the same command to start again; no checkpoint had been saved yet"
