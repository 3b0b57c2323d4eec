"""A call ends with the answer of whoever has the role; nothing that others answer counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import pytest

from engine.errors import DataError, MemoryFitError
from engine.remote.caller import Caller, RoleLostError
from engine.remote.view import View
from tests.remote.in_memory import MemoryBoard, MemoryWire, Sent, view_of


@dataclass
class Rig:
    """A caller that looks at the board when the test says so."""

    board: MemoryBoard
    wire: MemoryWire
    caller: Caller
    now: list[float]

    def publish(self, view: View) -> None:
        assert self.board.publish(view)
        self.caller.look()

    def start(self, *arguments: Any) -> Future[Any]:
        return self.caller.start("host-0", "work", *arguments)

    @property
    def last(self) -> Sent:
        return self.wire.sent[-1]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(Caller, "_follow", lambda self: None)
    board, wire, now = MemoryBoard(), MemoryWire(), [100.0]
    caller = Caller(board, wire, lambda: now[0])
    yield Rig(board, wire, caller, now)
    caller.close()


def test_a_call_names_the_epoch_and_gets_the_answer(rig: Rig) -> None:
    rig.publish(view_of(1, host_0=3))
    found = rig.start(5, "x")
    assert (rig.last.member.actor, rig.last.member.epoch) == ("host_0-3", 3)
    assert (rig.last.method, rig.last.arguments) == ("work", (5, "x"))
    assert not found.done()
    rig.last.answer("y")
    assert found.result() == "y"
    other = rig.start()
    rig.last.answer(error=DataError("no"))
    with pytest.raises(DataError):
        other.result()
    assert (rig.caller.asked_again, rig.caller.refused) == (0, 0)


def test_a_call_waits_for_the_first_view(rig: Rig) -> None:
    found = rig.start()
    rig.caller.look()
    assert not rig.wire.sent
    rig.publish(view_of(1, host_0=3))
    rig.last.answer(1)
    assert found.result() == 1 and rig.caller.asked_again == 0


def test_a_call_is_sent_to_the_next_epoch_and_the_late_answer_is_refused(rig: Rig) -> None:
    """Before and after the new one has answered."""
    rig.publish(view_of(1, host_0=3))
    found = rig.start()
    old = rig.last
    rig.publish(view_of(2, host_0=4, planner=5))
    new = rig.last
    assert new.member.epoch == 4 and len(rig.wire.sent) == 2
    old.answer("old")
    assert not found.done() and rig.caller.refused == 1
    new.answer("new")
    old.answer("old")
    assert found.result() == "new" and rig.caller.refused == 2
    old.die()
    old.refuse()
    assert rig.caller.refused == 2, "neither is an answer"
    assert rig.caller.asked_again == 1


def test_only_the_supervisor_decides_that_an_actor_is_dead(rig: Rig) -> None:
    """Who does not answer keeps its role, and is asked again after some time: it may have been out of reach."""
    rig.publish(view_of(1, host_0=3))
    found = rig.start()
    for reaction in (Sent.die, Sent.refuse):
        count = len(rig.wire.sent)
        reaction(rig.last)
        for _ in range(3):
            rig.caller.look()
        assert len(rig.wire.sent) == count
        rig.now[0] += 2
        rig.caller.look()
        assert len(rig.wire.sent) == count + 1 and rig.last.member.epoch == 3
    rig.last.die()
    rig.publish(view_of(2, host_0=9))
    assert rig.last.member.epoch == 9, "at once"
    rig.last.answer(1)
    assert found.result() == 1


def test_what_cannot_be_sent_is_sent_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that call is lost, nor those that are sent after it."""
    waiting = [rig.start(number) for number in range(3)]

    def send(*arguments: object) -> None:
        raise OSError("Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(rig.wire, "send", send)
        rig.publish(view_of(1, host_0=3))
        waiting.append(rig.start(3))
    assert not rig.wire.sent
    rig.now[0] += 2
    rig.caller.look()
    assert sorted(sent.arguments[0] for sent in rig.wire.sent) == [0, 1, 2, 3]
    for sent in rig.wire.sent:
        sent.answer(*sent.arguments)
    assert [future.result(0) for future in waiting] == [0, 1, 2, 3]


def test_roles_whose_epoch_stays_are_not_asked_again(rig: Rig) -> None:
    rig.publish(view_of(1, host_0=3, host_1=4))
    rig.start()
    rig.publish(view_of(2, host_0=3, host_1=5))
    rig.publish(view_of(3, host_0=3, host_1=5))
    assert len(rig.wire.sent) == 1


def test_a_role_that_is_gone_is_an_error(rig: Rig) -> None:
    rig.publish(view_of(1, host_0=3))
    found = rig.start()
    rig.publish(view_of(2, host_1=4))
    for lost in (found, rig.start()):
        with pytest.raises(RoleLostError, match="host-0"):
            lost.result(0)


def test_a_call_that_no_actor_survives_gets_an_error(rig: Rig) -> None:
    """A block that needs more memory than the host has, for example. Another call may need many actors, too."""
    for epoch in range(1, 4):
        rig.publish(view_of(epoch, host_0=epoch))
        if epoch == 1:
            fatal = rig.start("large")
        rig.start("small")
        for one in rig.wire.sent[-2:]:
            if one.arguments == ("small",):
                one.answer(epoch)
    assert not fatal.done()
    rig.publish(view_of(4, host_0=4))
    with pytest.raises(MemoryFitError, match="work of host-0"):
        fatal.result(0)


def test_epochs_of_one_actor_are_no_deaths(rig: Rig) -> None:
    """Each supervisor gives new ones."""
    rig.publish(view_of(1, host_0=1))
    found, member = rig.start(), rig.caller._view.members["host-0"]
    for epoch in range(2, 9):
        rig.publish(View(epoch, epoch, {"host-0": replace(member, epoch=epoch)}))
        assert rig.last.member.epoch == epoch
    rig.last.answer(1)
    assert found.result(0) == 1


def test_the_end_of_the_caller_ends_its_calls(rig: Rig) -> None:
    rig.publish(view_of(1, host_0=3))
    found = rig.start()
    rig.caller.close()
    with pytest.raises(RoleLostError):
        found.result(0)
    rig.last.answer(1)


def test_what_an_answer_starts_may_call_again(rig: Rig) -> None:
    """Functions that are told of a result start the next call in the same thread."""
    rig.publish(view_of(1, host_0=3))
    rig.start().add_done_callback(lambda _: rig.start("next"))
    rig.last.answer(1)
    assert rig.last.arguments == ("next",)


def test_views_are_followed_while_a_call_waits() -> None:
    board, wire = MemoryBoard(), MemoryWire()
    caller = Caller(board, wire)
    found = caller.start("host-0", "work")
    board.publish(view_of(1, host_0=3))
    for _ in range(1000):
        if wire.sent:
            break
        time.sleep(0.01)
    wire.sent[0].answer(7)
    assert found.result(5) == 7
    caller.close()
