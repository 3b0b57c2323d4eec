"""Launches whose processes a scheduler has started: srun, torchrun, Kubernetes. The first one is the launcher.

```
 node 0                                          node 1
 launcher = the first process                    the first process of the node waits for RUN/logs/launch-KEY.json,
    | writes RUN/logs/launch-KEY.json            connects, and becomes the agent of the node
    | <- join: node 1 --------------------------- |
    | -- again, start, ... (engine/launch/agents/agent.py) -> |
    | -- end: exit code ------------------------> | ends with it
```
The file has the address of the launcher and a random secret for this launch. Only its owner can read it. Further
processes of a node only wait for the exit code of its first one.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from engine.control.link import Link
from engine.control.protocol import Again, End, Hello, Join, ProtocolError
from engine.control.signals import STOP_SIGNALS, handled
from engine.control.sockets import Listener, connect
from engine.errors import BytescaleError, ExitCode, PreflightError, storage_error
from engine.interrupts import is_interrupt
from engine.job import Job
from engine.launch.agents.agent import Agent
from engine.launch.agents.commands import NodeCommand
from engine.launch.agents.launchers import Loss, Starts, how_to_resume
from engine.launch.checks.interface import own_address
from engine.launch.checks.ready import allow_many_files
from engine.launch.schedulers.joined import Joined
from engine.readers import MIB, open_regular, parse_object
from engine.run.folder import RunFolder

_JOIN_S = 600.0  # for the other processes to come, and for the launcher to appear
_FAREWELL_S = 15.0  # for those that have not come yet when the launch ends, so that they learn its exit code
_GRACE_S = 5.0
_RETRY_S = 0.5


@dataclass
class _Agent:
    link: Link
    host: str
    in_use: bool = False  # by the present start


class Joins:
    """The launcher of a launch that others join. It starts the agent of the first node, and waits for the others.

    When it is left, all other processes get the exit code, and end with it.
    """

    answer_s = _JOIN_S

    def __init__(self, joined: Joined, folder: RunFolder, environment: Mapping[str, str]) -> None:
        """No process can join before it is entered. Raises PreflightError if the named interface cannot be used."""
        self.joined, self._folder = joined, folder
        self.address = own_address(environment) if joined.nodes > 1 else "127.0.0.1"
        self._here = Starts()
        self._listener: Listener | None = None
        self._followers: _Followers | None = None
        self._agents = dict[int, _Agent]()
        self._strangers = selectors.DefaultSelector()  # links whose node is not known yet
        self._gone = set[int]()
        self._missing = list[Path]()  # folders that did not exist
        self._published = False
        self._secret = secrets.token_bytes(32)

    def __enter__(self) -> Joins:
        """Listen for the other processes. Raises PreflightError if that is not possible."""
        allow_many_files()
        self._followers = _Followers(self.joined)
        self._missing = [path for path in (self._folder.logs, self._folder.root) if not path.exists()]
        if self.joined.nodes > 1:
            try:
                self._listener = Listener(self.address, self._secret)
            except OSError as error:
                message = f"cannot listen on {self.address}: {error.strerror}"
                raise PreflightError(
                    message, key="GLOO_SOCKET_IFNAME", hint="name an interface of this host"
                ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        code = 0 if error is None else _code_of(error)
        try:
            self._dismiss(code)
        finally:
            if self._followers is not None:
                self._followers.dismiss(code)

    def job(self, job: Job) -> Job:
        """Return the job with this machine as its first node. The names of the others are not host names."""
        first, *others = job.nodes
        return Job(job.config, (replace(first, host="localhost"), *others))

    def publish(self) -> None:
        """Write the file through which the others join, in a locked run folder. Remove those of launches that died."""
        for path in self._folder.logs.glob(self._folder.launch("*").name):
            path.unlink(missing_ok=True)
        self._write()

    def _write(self) -> None:
        if self._listener is None:
            return
        path = self._folder.launch(self.joined.key)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        facts = {"host": self.address, "port": self._listener.port, "secret": self._secret.hex()}
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(facts, file)
        draft.replace(path)
        self._published = True

    def withdraw(self) -> None:
        """Remove the file."""
        if self._published:
            self._folder.launch(self.joined.key).unlink(missing_ok=True)
            self._published = False

    def start(self, commands: Sequence[NodeCommand], folder: RunFolder) -> None:
        """Start the agent of this machine. The others are used as they come."""
        self._here.start(commands[:1], folder)

    def poll(self) -> list[tuple[int, Link]]:
        """Return the links of agents that have come."""
        self._admit()
        found = self._here.poll()
        for node, agent in self._agents.items():
            if not agent.in_use:
                agent.in_use = True
                with suppress(OSError):  # its end is noticed when it is read from
                    agent.link.send(Again())
                found.append((node, agent.link))
        return found

    def lost(self, node: int, answered: bool, silent_s: float | None) -> Loss:
        """Say why an agent is gone. This launcher cannot start it again."""
        if node == 0:
            return self._here.lost(0, answered, silent_s)
        agent = self._agents.pop(node)
        agent.link.close()
        self._gone.add(node)
        what = "its connection has ended" if silent_s is None else f"it has not answered for {silent_s:.0f} s"
        hint = f"only {self.joined.by} can start its process again; {how_to_resume(self._folder)}"
        return Loss(f"({agent.host}) was lost", ExitCode.HANG, hint, what)

    def absent(self, node: int) -> Loss:
        """Say how a node joins."""
        if node == 0:
            return self._here.absent(0)
        hint = f"{self.joined.by} must start the same command on every node, and all must share {self._folder.root}"
        return Loss(f"has not joined within {self.answer_s:.0f} s", ExitCode.PREFLIGHT, hint)

    def secret_for(self, node: int) -> str | None:
        """Return the secret for the first node, over its pipe. The others have read it from the launch file."""
        return self._secret.hex() if node == 0 else None

    def stop(self) -> None:
        """End the ranks of all nodes. The agents of other nodes stay for the next start."""
        self._here.stop()
        last = time.monotonic() + _GRACE_S
        with selectors.DefaultSelector() as waits:
            for agent in self._agents.values():
                if agent.in_use:
                    agent.in_use = False
                    with suppress(OSError):
                        agent.link.send(Again())  # it says hello when its ranks have ended
                        waits.register(agent.link, selectors.EVENT_READ, agent.link)
            while waits.get_map() and (left := last - time.monotonic()) > 0:
                for key, _ in waits.select(left):
                    try:
                        done = any(isinstance(message, Hello) for message in key.data.receive())
                    except (EOFError, ProtocolError):
                        done = True
                    if done:
                        waits.unregister(key.data)

    @property
    def restarts(self) -> bool:
        """Whether the agents of all nodes are there."""
        return not self._gone

    def _admit(self) -> None:
        """Accept the agents that have connected. One of a node that has an agent already is sent away.

        Raises PreflightError for one of another version of ByteScale.
        """
        if self._listener is None:
            return
        for new in self._listener.links():
            self._strangers.register(new, selectors.EVENT_READ, new)
        for key, _ in self._strangers.select(0):
            link: Link = key.data
            try:
                if not (messages := link.receive()):
                    continue
                first = messages[0]
            except EOFError:
                first = None
            except ProtocolError as error:
                self._strangers.unregister(link)
                with suppress(OSError):
                    link.send(End(error.code))
                link.close()
                raise error.by("a process of another node") from error
            self._strangers.unregister(link)
            if isinstance(first, Join) and 0 < first.node < self.joined.nodes and first.node not in self._agents:
                self._agents[first.node] = _Agent(link, first.host)
            else:
                link.close()

    def _dismiss(self, code: int) -> None:
        """Tell the agents of all nodes to end with this exit code; those that come too late find no file."""
        if self._listener is None:
            return
        with suppress(OSError):
            if not self._published:  # the launch was rejected before it had a folder
                self._folder.logs.mkdir(parents=True, exist_ok=True)
                self._write()
            last = time.monotonic() + _FAREWELL_S
            while len(self._agents) + len(self._gone) < self.joined.nodes - 1 and time.monotonic() < last:
                time.sleep(_RETRY_S / 10)
                self._admit()
        for agent in self._agents.values():
            with suppress(OSError):
                agent.link.send(End(code))
        with suppress(OSError):
            self.withdraw()
        self._listener.close()
        strangers = [key.data for key in self._strangers.get_map().values()]
        for link in (*strangers, *(agent.link for agent in self._agents.values())):
            link.close()
        self._strangers.close()
        for path in self._missing:
            with suppress(OSError):  # it is used now
                path.rmdir()


class _Followers:
    """The other processes of this node. They wait at a socket of this machine for the exit code of the first one."""

    def __init__(self, joined: Joined) -> None:
        self._left, self._socket = joined.processes - 1, None
        if self._left:
            self._socket = socket.socket(socket.AF_UNIX)
            try:
                self._socket.bind(_meeting(joined))
            except OSError as error:
                self._socket.close()
                message = f"{joined.by} seems to run this command twice on this node: {error.strerror}"
                raise PreflightError(message, hint="wait until the other one has ended") from error
            self._socket.listen(self._left)  # connections wait to be accepted until `dismiss`

    def dismiss(self, code: int) -> None:
        """Tell all others of this node the exit code, also those that start more slowly."""
        if self._socket is None:
            return
        last = time.monotonic() + _FAREWELL_S
        with self._socket, suppress(TimeoutError):
            while self._left:
                self._socket.settimeout(max(0.01, last - time.monotonic()))
                follower, _ = self._socket.accept()
                with follower, suppress(OSError):
                    if _user_of(follower) == os.geteuid():  # every user of this machine can connect
                        self._left -= 1
                        follower.sendall(str(code).encode())


def _meeting(joined: Joined) -> str:
    """The name of the socket of a node. The leading zero keeps it out of the file system; it ends with its process."""
    return f"\0bytescale-{os.geteuid()}-{joined.key}-{joined.node}"


def _user_of(other: socket.socket) -> int:
    """Return the effective user of the process at the other end of a Unix socket."""
    credentials = struct.Struct("iII")  # struct ucred: pid, uid, gid
    return int(credentials.unpack(other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))[1])


def take_part(joined: Joined, folder: RunFolder) -> int:
    """Be a process of a launch that is not its first: the agent of a node, or one that waits. Return the exit code.

    Raises PreflightError if there is no launch to join.
    """
    if joined.local:
        return _follow(joined)
    followers, code = _Followers(joined), int(ExitCode.HANG)
    try:
        code = _serve(joined, folder)
    except BytescaleError as error:
        code = int(error.code)
        raise
    finally:
        followers.dismiss(code)
    return code


def _leader(joined: Joined) -> socket.socket:
    """Connect to the first process of this node. Raises PreflightError if there is none of this user."""
    last = time.monotonic() + _JOIN_S
    while time.monotonic() < last:
        leader = socket.socket(socket.AF_UNIX)
        with suppress(OSError):
            leader.connect(_meeting(joined))
            if _user_of(leader) == os.geteuid():  # else a stranger has taken the name of the socket
                return leader
        leader.close()
        time.sleep(_RETRY_S)
    raise _nothing_to_join(joined, "its first process")


def _follow(joined: Joined) -> int:
    """Wait for the exit code of the first process of this node, which passes on what schedulers ask."""
    with _leader(joined) as leader:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        try:
            said = leader.recv(16)
        except ConnectionError:  # the first process was killed before it had accepted
            said = b""
    return int(said) if said else ExitCode.HANG


def _serve(joined: Joined, folder: RunFolder) -> int:
    """Find the launcher and be the agent of this node. Return the exit code that the launcher names."""
    last = time.monotonic() + _JOIN_S
    while time.monotonic() < last:
        with suppress(OSError):
            facts = _read(folder, joined)
            secret = bytes.fromhex(facts["secret"])
            link = connect(facts["host"], facts["port"], secret, seconds=_GRACE_S)
            if (code := _work(link, secret, joined)) is not None:
                return code
        time.sleep(_RETRY_S)  # the file may be that of an earlier launch
    raise _nothing_to_join(joined, f"launcher in {folder.logs}")


def _read(folder: RunFolder, joined: Joined) -> dict[str, Any]:
    """Return the launcher's file. Raises PreflightError if another user may have written it: agents obey it."""
    path, user = folder.launch(joined.key), os.geteuid()
    with open_regular(path, PreflightError, "remove it") as file:
        owner = os.fstat(file.fileno()).st_uid
        # Where root is not root for the file server, as in containers, its files belong to the owner of its folders.
        if owner != user and not (user == 0 and owner == folder.root.stat().st_uid):
            message = f"is owned by user {owner}; the agent of user {user} ignores it"
            raise PreflightError(message, key=str(path), hint="start all processes of a launch as the same user")
        return parse_object(file.read(MIB), str(path), PreflightError, "remove it")


def _work(link: Link, secret: bytes, joined: Joined) -> int | None:
    """Be the agent of this node. Return the exit code; None if the launcher did not want this process."""
    agent = Agent(link, secret)
    for number in handled():
        signal.signal(number, lambda number, _: agent.pass_on(number))
    try:
        link.send(Join(joined.node, socket.gethostname()))
        code = agent.run()
    except OSError:  # the launcher is gone
        code = ExitCode.HANG
    except ProtocolError as error:
        raise error.by("the launcher or a rank") from error
    finally:
        agent.close()
        link.close()
    return code if agent.used else None


def _nothing_to_join(joined: Joined, what: str) -> PreflightError:
    message = f"node {joined.node} has found no {what} for {_JOIN_S:.0f} s"
    hint = f"{joined.by} must start the same command on every node, and all must share the run folder"
    return PreflightError(message, key="run.out", hint=hint)


def _code_of(error: BaseException) -> int:
    """The exit code of the first process, as bytescale_cli/errors.py decides it."""
    if is_interrupt(error):
        return ExitCode.INTERRUPTED
    known = error if isinstance(error, BytescaleError) else storage_error(error)
    return int(known.code) if known is not None else ExitCode.BUG
