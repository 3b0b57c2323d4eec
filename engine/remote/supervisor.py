"""The supervisor of a data plane: the one process that decides which actor has which role.

```
 actor     start -> standby (warm) -> takes a role -> member -> replaced: SIGKILL on its host
 dead      its beat is an error, or there was none for the deadline
 replace   a standby takes the role with the next epoch, the view is published, then the old one is killed
```
The start of a run is the same: all roles are vacant. If the supervisor dies, the actors go on. Another one finds them
by their names and gives all roles new epochs. Of two supervisors, only one can publish the next version of the view.

This module has no Ray: `Fleet` is what it needs of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from engine.errors import BytescaleError, PreflightError
from engine.remote.view import PLANNER, Board, Member, Process, View, host_of, host_role

_START_S = 600.0  # until the first beat of an actor, which imports our packages
_CLEAN_S = 3.0  # for actors to remove files; the agent waits longer for the supervisor
_ATTEMPTS = 3  # actors of a host that may end before their first beat, or while they take the same role


class Beat(NamedTuple):
    """The answer of an actor to the supervisor: it runs, in this process, with this epoch (0: it had no role)."""

    process: Process
    epoch: int


class Fleet(Protocol):
    """The actors of a run. No method waits; futures may get any error if the actor has ended."""

    def find(self) -> Mapping[str, int]:
        """Return the names of all actors, with their hosts."""
        ...

    def start(self, host: int) -> str:
        """Start an actor on a host; return its name."""
        ...

    def beat(self, actor: str) -> Future[Beat]:
        """Ask for a sign of life."""
        ...

    def become(self, actor: str, role: str, epoch: int) -> Future[None]:
        """Give an actor a role, or another epoch of the role that it has."""
        ...

    def clean(self, actor: str) -> Future[None]:
        """Let an actor remove the files of the run on its host."""
        ...

    def kill(self, actor: str, process: Process | None, helper: str | None) -> None:
        """End an actor. `helper`, on its host, kills the process: Ray leaves one that a signal has stopped."""
        ...


class Event(NamedTuple):
    """An actor is dead, or a role has another actor."""

    what: str  # lost, taken
    role: str  # standby: it had none
    host: int
    epoch: int  # of the role; 0 without one
    why: str  # how the actor ended; for the first actors of a run start, for those that a supervisor finds restart
    seconds: float  # since the last beat of the actor that was lost was asked for
    pid: int  # of the actor on its host; 0: it has not answered yet


class SupersededError(BytescaleError):
    """Another supervisor is at work."""


@dataclass(eq=False)
class _Actor:
    """An actor as the supervisor knows it."""

    name: str
    host: int
    beat: Future[Beat]
    asked: float  # when
    process: Process | None = None  # None until it is known
    found: bool = False  # an earlier supervisor has started it
    warm: bool = False  # it has answered a beat
    epoch: int = 0
    role: str | None = None
    taking: Future[None] | None = None  # until it has taken its role


class _Vacant(NamedTuple):
    """A role that waits for an actor."""

    why: str
    since: float
    old: _Actor | None = None


@dataclass(eq=False)
class Supervisor:
    """Call `begin` once, then `turn` about ten times a second, then `end`."""

    hosts: int
    standbys: int  # warm ones on each host; they take any role there
    deadline_s: float
    board: Board
    fleet: Fleet
    happened: Callable[[Event], None]
    view: View = field(default_factory=View)
    _actors: dict[str, _Actor] = field(default_factory=dict)
    _vacant: dict[str, _Vacant] = field(default_factory=dict)
    _failed: Counter[int | str] = field(default_factory=Counter)  # in a row: starts by host, takings by role
    _last: float | None = None  # time of the last turn

    def begin(self, now: float) -> None:
        """Find what an earlier supervisor has left. All its members get new epochs."""
        self.view = self.board.newest() or self.view
        processes = {one.actor: one.process for one in self.view.members.values()}
        for name, host in self.fleet.find().items():
            actor = self._add(name, host, now)
            actor.process, actor.found = processes.get(name), True
        for role in (PLANNER, *(host_role(host) for host in range(self.hosts))):
            self._vacant[role] = _Vacant("restart" if role in self.view.members else "start", now)

    def turn(self, now: float) -> None:
        """Look at all actors once, and act.

        Raises SupersededError, PreflightError if no actor of a host can start, or if none can take a role.
        """
        # After a stop of this process, or of the whole machine, all beats would be late.
        if self._last is not None and now - self._last > self.deadline_s / 2:
            for actor in self._actors.values():
                actor.asked = now
        self._last = now
        for actor, why in list(self._dead(now)):
            self._lose(actor, why, now)
        self._fill()
        for actor in list(self._actors.values()):
            if actor.taking is not None and actor.taking.done() and actor.taking.exception() is None:
                self._member(actor, now)
        self._refill(now)

    @property
    def complete(self) -> bool:
        """Whether each role has an actor."""
        return not self._vacant

    def end(self) -> None:
        """End all actors. The last one of each host, which may write files, removes those of the run."""
        able = [actor for actor in self._actors.values() if actor.warm]
        last = {actor.host: actor for actor in sorted(able, key=lambda one: one.role == host_role(one.host))}
        for actor in self._actors.values():
            if actor is not last.get(actor.host):
                self.fleet.kill(actor.name, actor.process, None)
        wait([self.fleet.clean(actor.name) for actor in last.values()], _CLEAN_S)
        for actor in last.values():
            self.fleet.kill(actor.name, actor.process, None)

    def _add(self, name: str, host: int, now: float) -> _Actor:
        self._actors[name] = _Actor(name, host, self.fleet.beat(name), now)
        return self._actors[name]

    def _dead(self, now: float) -> Iterator[tuple[_Actor, str]]:
        """Take the beats that have come; yield the actors that have ended, and why."""
        for actor in self._actors.values():
            taken = actor.taking.exception() if actor.taking is not None and actor.taking.done() else None
            if taken is not None:
                yield actor, type(taken).__name__
            elif not actor.beat.done():
                if now - actor.asked > (_START_S if actor.process is None else self.deadline_s):
                    yield actor, "deadline"
            elif (error := actor.beat.exception()) is not None:
                yield actor, type(error).__name__
            else:
                actor.process, epoch = actor.beat.result()
                actor.warm = True
                # An earlier supervisor may have given an epoch without publishing it.
                self.view = replace(self.view, epoch=max(self.view.epoch, epoch))
                self._failed[actor.host] = 0
                actor.beat, actor.asked = self.fleet.beat(actor.name), now

    def _lose(self, actor: _Actor, why: str, now: float) -> None:
        """Take an actor that is dead off the list. One with a role is killed when another has it."""
        del self._actors[actor.name]
        self._note("lost", actor, why, now - actor.asked)
        if actor.role is not None and actor.taking is None:
            self._vacant[actor.role] = _Vacant(why, actor.asked, actor)
            return
        self._kill(actor)
        if actor.role is not None:
            self._fail(actor.role, f"each process that becomes the {actor.role} of the data plane ends: {why}")
        elif not actor.warm and not actor.found:
            self._fail(actor.host, f"no process of the data plane can be started on host {actor.host}: {why}")

    def _fail(self, of: int | str, message: str) -> None:
        """Count an actor that has failed before it was of use. Raises PreflightError if there are several in a row."""
        self._failed[of] += 1
        if self._failed[of] == _ATTEMPTS:
            raise PreflightError(message, hint="the logs of Ray in the run folder, and of the system, may say why")

    def _fill(self) -> None:
        """Give vacant roles to warm actors: to those that have had them before a restart, else to standbys."""
        taking, free = {actor.role for actor in self._actors.values()}, list(self._free())
        owned = {one.actor for one in self.view.members.values()}
        for role in self._vacant.keys() - taking:
            before = self.view.members.get(role)
            if before is not None and before.actor in self._actors:
                able = [actor for actor in free if actor.name == before.actor]  # wait for its first beat
            else:
                hosts = self._roomiest() if host_of(role) is None else [host_of(role)]
                able = [one for one in free if one.host in hosts and one.name not in owned]
            if able:
                free.remove(chosen := able[0])
                self.view = replace(self.view, epoch=self.view.epoch + 1)
                chosen.role, chosen.epoch = role, self.view.epoch
                chosen.taking = self.fleet.become(chosen.name, role, chosen.epoch)

    def _roomiest(self) -> list[int]:
        """Return the hosts with most actors for any role, also such as still start: for a role that any host can have.

        From another host it would take the standby, so that one more is started there than is needed.
        """
        free = Counter(actor.host for actor in self._actors.values() if actor.role is None)
        taking = {actor.role for actor in self._actors.values()}
        free.subtract(host for role in self._vacant if role not in taking and (host := host_of(role)) is not None)
        return [host for host, count in free.items() if count == max(free.values())]

    def _free(self) -> Iterator[_Actor]:
        """Yield the warm actors without a role."""
        return (actor for actor in self._actors.values() if actor.warm and actor.role is None)

    def _member(self, actor: _Actor, now: float) -> None:
        """Publish that an actor has taken its role, and end the one before. The first view has all roles."""
        role, process = actor.role, actor.process
        assert role is not None and process is not None
        actor.taking = None
        vacant = self._vacant.pop(role)
        self._failed[role] = 0
        members = {**self.view.members, role: Member(actor.name, actor.host, process, actor.epoch)}
        self.view = replace(self.view, members=members)
        if len(members) == self.hosts + 1:
            self.view = replace(self.view, version=self.view.version + 1)
            if not self.board.publish(self.view):
                raise SupersededError("another supervisor is at work")
        self._note("taken", actor, vacant.why, now - vacant.since)
        if vacant.old is not None:
            self._kill(vacant.old)

    def _note(self, what: str, actor: _Actor, why: str, seconds: float) -> None:
        pid = actor.process.pid if actor.process else 0
        self.happened(Event(what, actor.role or "standby", actor.host, actor.epoch, why, seconds, pid))

    def _kill(self, actor: _Actor) -> None:
        helpers = [one.name for one in self._actors.values() if one.host == actor.host and one.warm]
        self.fleet.kill(actor.name, actor.process, helpers[0] if helpers else None)

    def _refill(self, now: float) -> None:
        """Start an actor for each vacant role that has none yet; on other hosts the standbys that are missing.

        A standby would only take processor time from an actor that is waited for.
        """
        taking = {actor.role for actor in self._actors.values()}
        waiting = [host_of(role) or 0 for role in self._vacant if role not in taking]  # the planner is on any host
        for host in range(self.hosts):
            free = sum(actor.host == host and actor.role is None for actor in self._actors.values())
            for _ in range((waiting.count(host) or self.standbys) - free):
                self._add(self.fleet.start(host), host, now)
