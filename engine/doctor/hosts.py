"""Checks the hosts of a hostfile: asks a small program on each of them (host.py), over the ssh that `train` uses."""

from __future__ import annotations

import os
import secrets
import selectors
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.cluster.hosts import is_local
from engine.config.devices import uses_gpus
from engine.config.schema import Config
from engine.control.link import Link
from engine.control.protocol import Answer, Ask, Failed
from engine.doctor.check import Check, Checks, failed, ok, warning
from engine.doctor.software import Software
from engine.doctor.storage import PREFIX, nearest
from engine.errors import PreflightError
from engine.files import new_file
from engine.launch.agents.agent import last_line
from engine.launch.agents.commands import over_ssh
from engine.launch.agents.environment import forwarded, needed_to_start
from engine.launch.checks.interface import INTERFACES
from engine.launch.checks.ready import Need
from engine.safe_path import safe_path

_PROGRAM = (sys.executable, "-m", "engine.doctor.host")
_START_S = 60.0  # ssh gives up after 20 s, and says why; Python may start from a slow file system
_ANSWER_S = 30.0
_AT_ONCE = 64  # hosts
_TICKS = 5  # round trips, of which the shortest gives the clock
# Logs of hosts whose clocks differ by more cannot be put in order. With more than the second limit, programs that
# compare times of shared files with their own, such as build tools, do too much or too little.
_APART_S, _FAR_APART_S = 1.0, 10.0
_SSH_FAILED = 255
_END_S = 5.0


class _LostError(PreflightError):
    """The program on a host does not answer."""


class _AnswerError(Exception):
    """The program on a host could not answer a question; the message says why."""


class _Host:
    """The program on a host, and the connection to it, which ends with this context."""

    def __init__(self, node: Node, number: int, variables: dict[str, str], logs: Path) -> None:
        self.node, self.number, self.lost = node, number, False
        self._here = is_local(node.host)
        self._command = _PROGRAM if self._here else over_ssh(node.host, _PROGRAM, needed_to_start(variables))
        self._log = logs / f"host-{number}.log"

    def __enter__(self) -> _Host:
        with new_file(self._log) as stderr:
            environment = os.environ | safe_path()
            self._process = subprocess.Popen(
                self._command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._link = Link(os.dup(self._process.stdout.fileno()), os.dup(self._process.stdin.fileno()))
        self._process.stdin.close()
        self._process.stdout.close()
        return self

    def __exit__(self, *raised: object) -> None:
        self._link.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, question: str, *values: Any, seconds: float = _ANSWER_S) -> Any:
        """Ask a question of host.py. Raises _LostError if no answer comes, _AnswerError if it could not be answered."""
        last = time.monotonic() + seconds
        try:
            self._link.send(Ask(0, question, values))
            with selectors.DefaultSelector() as waits:  # select() cannot watch descriptors above 1,023
                waits.register(self._link, selectors.EVENT_READ)
                while waits.select(max(0.0, last - time.monotonic())):
                    for message in self._link.receive():
                        match message:
                            case Failed(_, why):
                                raise _AnswerError(why)
                            case Answer(_, value):
                                return value
        except (EOFError, BrokenPipeError):
            self.lost = True
            raise self._ended() from None
        self.lost = True
        hint = f"check that Python starts on {self.node.host}"
        raise _LostError(f"{self.node.host} has not answered for {seconds:.0f} s", hint=hint)

    def _ended(self) -> _LostError:
        """Return the error that says why the program has ended."""
        code, name = self._process.wait(), self.node.host
        said = last_line(self._log, 0)
        message = f"{name}: {'Python' if self._here else 'ssh'} ended with code {code}" + (f": {said}" if said else "")
        if code == _SSH_FAILED:
            return _LostError(message, hint=f"check `ssh {name}`, which must work without a password")
        return _LostError(message, hint=f"every host needs this folder and {sys.executable} under the same paths")


@dataclass(frozen=True)
class _Ours:
    """What hosts are compared with, and what they are asked."""

    software: Software
    folder: Path  # the run folder, or the nearest of its parents that exists
    need: Need  # `ranks` differs by host
    variables: dict[str, str]  # that name interfaces
    addresses: tuple[str, ...]  # of all hosts


def look_at(config: Config, cluster: Cluster, logs: Path) -> list[Check]:
    """Check all hosts, each with its own connection. `logs` is a folder for what ssh says.

    Names of checks begin with the place of the host in the hostfile, such as `host 2: clock`.
    """
    variables = forwarded(os.environ, cluster).variables
    ours = _Ours(
        Software.here(),
        nearest(Path(config.run.out)),
        Need(0, cluster.ranks, len(cluster.nodes), uses_gpus(config)),
        {name: variables[name] for name in INTERFACES if name in variables},
        tuple(node.address for node in cluster.nodes),
    )
    with ExitStack() as stack, ThreadPoolExecutor(_AT_ONCE) as pool:
        hosts = [stack.enter_context(_Host(node, n, variables, logs)) for n, node in enumerate(cluster.nodes)]
        found = list(pool.map(partial(_checks, ours), hosts))
        # Others connect to the agent and the ranks of the first host, which firewalls between hosts may block.
        if not hosts[0].lost and len(hosts) > 1:
            place = ours.addresses[0], hosts[0].ask("listen", ours.variables, ours.addresses[1])
            others = [host for host in hosts[1:] if not host.lost]
            for host, check in zip(others, pool.map(partial(_meets, place), others), strict=True):
                found[host.number].append(check)
    return [
        replace(check, name=f"host {number}: {check.name}", section="hosts")
        for number, checks in enumerate(found, start=1)
        for check in checks
    ]


def _checks(ours: _Ours, host: _Host) -> list[Check]:
    """Do the checks of a host, until it is lost."""
    checks = Checks()
    for name, look in (
        ("ssh", partial(_answers, host)),
        ("clock", partial(_clock, host)),
        ("versions", partial(_versions, host, ours.software)),
        ("run folder", partial(_shared, host, ours.folder)),
        ("limits", partial(_limits, host, ours)),
    ):
        if not host.lost:
            checks.add("hosts", name, look)
    return checks.found


def _answers(host: _Host) -> Check:
    began = time.monotonic()
    host.ask("clock", seconds=_START_S)
    value = f"{time.monotonic() - began:.1f} s"
    return ok("ssh", f"{host.node.host} answers after {value}", value)


def _clock(host: _Host) -> Check:
    """Compare clocks: the host read its own between our two readings, at an unknown time."""
    rounds = []
    for _ in range(_TICKS):
        before = time.time()
        theirs = host.ask("clock")
        after = time.time()
        rounds.append((after - before, theirs - (before + after) / 2))
    trip, apart = min(rounds)
    value = f"{apart:+.2f} s"
    message = f"the clock of {host.node.host} differs by {value} (+- {trip / 2:.2g} s)"
    if abs(apart) - trip / 2 <= _APART_S:
        return ok("clock", message, value)
    state = failed if abs(apart) > _FAR_APART_S else warning
    return state("clock", message, "set the clocks of all hosts by NTP: `timedatectl` shows whether that is on", value)


def _versions(host: _Host, ours: Software) -> list[Check]:
    """Compare the versions of Python, of our sources and of packages with those here."""
    name, theirs = host.node.host, Software(**host.ask("software"))
    found = []
    if theirs.python != ours.python:
        message = f"{name} runs Python {theirs.python}, this machine {ours.python}"
        found.append(failed("python", message, f"make {sys.executable} the same on all hosts", theirs.python))
    else:
        found.append(ok("python", theirs.python, theirs.python))
    if theirs.code != ours.code:
        message = f"{name} has other sources of ByteScale ({theirs.code}) than this machine ({ours.code})"
        hint = "install the same version on all hosts, or share the folder that it is in"
        found.append(failed("bytescale", message, hint, theirs.code))
    else:
        found.append(ok("bytescale", f"has the same sources, {theirs.code}", theirs.code))
    other = [one for one, version in ours.packages.items() if theirs.packages.get(one) != version]
    if other:
        texts = [f"{one} {theirs.packages.get(one)} instead of {ours.packages[one]}" for one in other]
        message = f"{name} has {', '.join(texts)}"
        hint = "install the same versions on all hosts, or share the environment that they are in"
        found.append(failed("packages", message, hint, ", ".join(f"{one} {theirs.packages.get(one)}" for one in other)))
    else:
        found.append(ok("packages", f"has the same versions of {len(ours.packages)} packages", "the same"))
    return found


def _shared(host: _Host, folder: Path) -> Check:
    """Check that a file that is written here is seen by the host, and the other way round."""
    name, content = host.node.host, secrets.token_hex(16)
    mark = f"{PREFIX}{host.number}-{secrets.token_hex(4)}"
    here, there = folder / f"{mark}-here", folder / f"{mark}-there"
    hint = "all hosts need the run folder on a shared file system, at the same path: set run.out=DIR"
    try:
        here.write_text(content, encoding="utf-8")
        try:
            same = host.ask("shared", str(here), str(there)) == content
        except _AnswerError as error:
            message = f"{name} cannot use {folder}: {error}"
            return failed("run folder", message, hint, str(error))
        if not same or not there.exists() or there.read_text(encoding="utf-8") != content:
            message = f"{folder} is not the same folder on {name}: a file written there is not seen here"
            return failed("run folder", message, hint, "not shared")
    except OSError as error:
        return failed("run folder", f"{folder} cannot be written here: {error.strerror}", hint, error.strerror)
    finally:
        for path in (here, there):
            with suppress(OSError):
                path.unlink()
    return ok("run folder", f"{name} sees files that are written here, and the other way round", "shared")


def _limits(host: _Host, ours: _Ours) -> list[Check]:
    """Let the host check its own limits, GPUs and interfaces."""
    peers = [ours.addresses[0]] if host.number else list(ours.addresses[1:2])
    need = ours.need._replace(ranks=host.node.devices)
    answers = host.ask("limits", need._asdict(), ours.variables, peers)
    return [Check(**{**answer, "message": f"{host.node.host}: {answer['message']}"}) for answer in answers]


def _meets(place: tuple[str, int], host: _Host) -> Check:
    """Let the host connect to a port of the first host, as its ranks will."""
    first, port = place
    try:
        seconds = host.ask("connect", first, port)
    except (_AnswerError, _LostError) as error:
        message = f"{host.node.host} cannot connect to port {port} of {first}: {error}"
        hint = "open all ports between hosts in their firewalls; agents and ranks connect to free ports"
        return failed("rendezvous", message, hint, "no connection")
    return ok("rendezvous", f"{host.node.host} reaches a free port of {first} in {1e3 * seconds:.2g} ms", "works")
