"""A board, a wire and a fleet without Ray, which a test steps through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from engine.remote.caller import Answer
from engine.remote.supervisor import Beat
from engine.remote.view import Member, Process, View


class MemoryBoard:
    """All views that were published, as the lines that Ray would keep."""

    def __init__(self) -> None:
        self.lines = dict[int, str]()

    def newest(self, version: int = 0) -> View | None:
        last = max(self.lines, default=0)
        return View.of_json(self.lines[last]) if last > version else None

    def publish(self, view: View) -> bool:
        if view.version in self.lines:
            return False
        self.lines[view.version] = view.to_json()
        return True


def view_of(version: int, **epochs: int) -> View:
    """A view whose roles have these epochs: host_0=3 is the role host-0."""
    members = {
        role.replace("_", "-"): Member(f"{role}-{epoch}", 0, Process(epoch, 0), epoch) for role, epoch in epochs.items()
    }
    return View(version, max(epochs.values(), default=0), members)


@dataclass
class Sent:
    """A call on the wire that waits for the test to answer it."""

    member: Member
    method: str
    arguments: tuple[Any, ...]
    answered: Callable[[Answer | None], None]

    def answer(self, value: Any = None, error: Exception | None = None) -> None:
        self.answered(Answer(self.member.epoch, value, error))

    def refuse(self) -> None:
        self.answered(Answer(None, None))

    def die(self) -> None:
        self.answered(None)


@dataclass
class MemoryWire:
    """Calls that were sent, in their order."""

    sent: list[Sent] = field(default_factory=list)

    def send(
        self, member: Member, method: str, arguments: tuple[Any, ...], answered: Callable[[Answer | None], None]
    ) -> None:
        self.sent.append(Sent(member, method, arguments, answered))


@dataclass(eq=False)
class FakeActor:
    host: int
    process: Process
    epoch: int = 0
    role: str | None = None
    state: str = "runs"  # stopped, ended
    waiting: list[Callable[[], None]] = field(default_factory=list)  # what a stopped one does when it goes on


@dataclass
class MemoryFleet:
    """Actors that answer at once, unless a test has stopped or ended them."""

    actors: dict[str, FakeActor] = field(default_factory=dict)
    killed: list[tuple[str, str | None]] = field(default_factory=list)  # and through which actor
    cleaned: list[str] = field(default_factory=list)
    starts: bool = True  # otherwise actors end before their first beat
    made: int = 0

    def find(self) -> Mapping[str, int]:
        return {name: one.host for name, one in self.actors.items() if one.state != "ended"}

    def start(self, host: int) -> str:
        self.made += 1
        name = f"actor-{self.made}"
        self.actors[name] = FakeActor(host, Process(self.made, 7), state="runs" if self.starts else "ended")
        return name

    def beat(self, actor: str) -> Future[Beat]:
        one = self.actors[actor]
        return self._ask(one, lambda: Beat(one.process, one.epoch))

    def become(self, actor: str, role: str, epoch: int) -> Future[None]:
        one = self.actors[actor]

        def take() -> None:
            one.role, one.epoch = role, epoch

        return self._ask(one, take)

    def clean(self, actor: str) -> Future[None]:
        return self._ask(self.actors[actor], lambda: self.cleaned.append(actor))

    def kill(self, actor: str, process: Process | None, helper: str | None) -> None:
        self.killed.append((actor, helper))
        self.actors[actor].state = "ended"

    def _ask(self, one: FakeActor, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def answer() -> None:
            if one.state == "ended":
                future.set_exception(ConnectionError("it has ended"))
            else:
                future.set_result(work())

        if one.state == "stopped":
            one.waiting.append(answer)
        else:
            answer()
        return future
