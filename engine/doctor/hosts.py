"""Checks the hosts of a hostfile: starts the agents that `train` starts, and queries them (host.py)."""

from __future__ import annotations

import os
import secrets
import selectors
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.cluster.hostfile import Node
from engine.config.devices import uses_gpus
from engine.control.link import Link
from engine.control.protocol import Answer, Ask, Failed, ProtocolError
from engine.doctor.check import Check, Checks, failed, ok, warning
from engine.doctor.interconnect import IB_VARIABLES, Cards, Port, cards, compare
from engine.doctor.software import Software, extras
from engine.doctor.storage import PREFIX, nearest
from engine.errors import PreflightError
from engine.job import Job
from engine.launch.agents.commands import node_commands
from engine.launch.agents.environment import forwarded
from engine.launch.agents.launchers import Starts
from engine.launch.checks.interface import INTERFACES
from engine.launch.checks.ready import Need
from engine.remote.node import shared_memory
from engine.run.folder import RunFolder

_ANSWER_S = 30.0
_AT_ONCE = 64  # hosts
_TICKS = 5  # round trips, of which the shortest gives the clock
# Logs of hosts whose clocks differ by more cannot be put in order. With more than the second limit, programs that
# compare times of shared files with their own, such as build tools, do too much or too little.
_APART_S, _FAR_APART_S = 1.0, 10.0


class _LostError(PreflightError):
    """The agent of a host does not answer."""


class _AnswerError(Exception):
    """The agent of a host could not answer a question; the message says why."""


class _Host:
    """The agent on a host, which answers questions (host.py)."""

    def __init__(self, node: Node, number: int, launcher: Starts, link: Link) -> None:
        self.node, self.number, self.lost = node, number, False
        self._launcher, self._link = launcher, link

    def ask(self, question: str, *values: Any, seconds: float = _ANSWER_S) -> Any:
        """Ask a question of host.py. Raises _LostError if no answer comes, _AnswerError if it could not be answered."""
        last, host = time.monotonic() + seconds, self.node.host
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
            self.lost, loss = True, self._launcher.lost(self.number, answered=False, silent_s=None)
            # The rest of the hint is for `train`: it names this command.
            raise _LostError(f"{host}: {loss.why or loss.what}", hint=loss.hint.partition(";")[0]) from None
        except ProtocolError as error:
            self.lost = True
            raise _LostError(f"{host} {error}", hint=error.problems[0].hint) from None
        self.lost = True
        raise _LostError(f"{host} has not answered for {seconds:.0f} s", hint=self._launcher.absent(self.number).hint)


@dataclass(frozen=True)
class _Ours:
    """The facts of this machine with which hosts are compared, and the parameters of their checks."""

    software: Software
    extras: list[str]  # packages of it that only some configs need
    folder: Path  # the run folder, or the nearest of its parents that exists
    need: Need  # `ranks` differs by host
    variables: dict[str, str]  # that name interfaces
    addresses: tuple[str, ...]  # of all hosts


def look_at(job: Job, logs: Path) -> list[Check]:
    """Check all hosts of a job, each through its own agent. `logs` is an empty folder for what ssh and agents print.

    Names of checks begin with the place of the host in the hostfile, such as `host 2: clock`.
    """
    config, cluster = job.config, job.cluster
    variables = forwarded(os.environ, cluster).variables
    ours = _Ours(
        Software.here(*extras(config.data)),
        extras(config.data),
        nearest(Path(config.run.out)),
        Need(0, cluster.ranks, len(cluster.nodes), uses_gpus(config), shared_memory(config.data)),
        {name: variables[name] for name in INTERFACES if name in variables},
        tuple(node.address for node in cluster.nodes),
    )
    folder, launcher = RunFolder(logs), Starts()
    folder.logs.mkdir(parents=True)
    with ExitStack() as stack, ThreadPoolExecutor(_AT_ONCE) as pool:
        stack.callback(launcher.stop)
        launcher.start(node_commands(job, folder, None), folder)
        hosts = [_Host(cluster.nodes[number], number, launcher, link) for number, link in launcher.poll()]
        found = list(pool.map(partial(_checks, ours), hosts))
        # Cards are judged together: what one host lacks may be what all others have.
        if ours.need.gpus and len(hosts) > 1:
            answers = zip(hosts, pool.map(partial(_cards, variables), hosts), strict=True)
            checks = compare({host.node.host: one for host, one in answers if one is not None})
            for host in hosts:
                found[host.number] += [checks[host.node.host]] if host.node.host in checks else []
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
        ("versions", partial(_versions, host, ours.software, ours.extras)),
        ("run folder", partial(_shared, host, ours.folder)),
        ("limits", partial(_limits, host, ours)),
    ):
        if not host.lost:
            checks.add("hosts", name, look)
    return checks.found


def _answers(host: _Host) -> Check:
    began = time.monotonic()
    host.ask("clock", seconds=Starts.answer_s)
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


def _versions(host: _Host, ours: Software, extras: Sequence[str]) -> list[Check]:
    """Compare the versions of Python, of our sources and of packages with those here."""
    name, theirs = host.node.host, Software(**host.ask("software", *extras))
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


def _cards(variables: Mapping[str, str], host: _Host) -> Cards | None:
    """Return what NCCL makes of the network cards of a host; None if it is lost, which its checks report."""
    if host.lost:
        return None
    try:
        answer = host.ask("network_cards", {name: variables[name] for name in IB_VARIABLES if name in variables})
    except (_AnswerError, _LostError):
        return None
    return cards([Port(*one) for one in answer["ports"]], answer["variables"])


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
