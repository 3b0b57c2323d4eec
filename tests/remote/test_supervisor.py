"""What the supervisor decides, on actors and a clock that the test moves."""

from __future__ import annotations

import random
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from engine.errors import PreflightError
from engine.remote import supervisor
from engine.remote.supervisor import Event, SupersededError, Supervisor
from engine.remote.view import Member, host_of
from tests.remote.in_memory import FakeActor, MemoryBoard, MemoryFleet

ROLES = ["planner", "host-0", "host-1"]


@dataclass
class Rig:
    """Two hosts with a standby each, and a deadline of 3 s."""

    board: MemoryBoard = field(default_factory=MemoryBoard)
    fleet: MemoryFleet = field(default_factory=MemoryFleet)
    events: list[Event] = field(default_factory=list)
    now: float = 50.0
    standbys: int = 1

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Another supervisor finds what the one before has left."""
        self.supervisor = Supervisor(2, self.standbys, 3.0, self.board, self.fleet, self.events.append)
        self.supervisor.begin(self.now)

    def turn(self, count: int = 5) -> None:
        for _ in range(count):
            self.now += 0.1
            self.supervisor.turn(self.now)

    @property
    def members(self) -> dict[str, Member]:
        view = self.board.newest()
        return {} if view is None else dict(view.members)

    def actor(self, role: str) -> FakeActor:
        return self.fleet.actors[self.members[role].actor]

    def resume(self) -> None:
        """Let all that are stopped go on."""
        for actor in self.fleet.actors.values():
            if actor.state == "stopped":
                actor.state = "runs"
                for answer in actor.waiting:
                    answer()
                actor.waiting.clear()

    def lost(self) -> list[tuple[str, str]]:
        return [(one.role, one.why) for one in self.events if one.what == "lost"]

    def check(self) -> None:
        """Each role has a running actor on the right host with the epoch of the view, and no two have the same."""
        assert sorted(self.members) == sorted(ROLES)
        for role, member in self.members.items():
            actor = self.actor(role)
            assert (actor.state, actor.role, actor.epoch) == ("runs", role, member.epoch)
            assert host_of(role) in (None, actor.host) and member.process == actor.process
        assert len({member.epoch for member in self.members.values()}) == 3
        running = [one for one in self.fleet.actors.values() if one.state == "runs"]
        assert len(running) == 3 + 2 * self.standbys, "none is left over, no standby is missing"


@pytest.fixture
def rig() -> Rig:
    made = Rig()
    made.turn()
    made.check()
    return made


def test_a_run_begins_with_one_view_of_all_roles(rig: Rig) -> None:
    assert [*rig.board.lines] == [1]
    assert {(one.what, one.why) for one in rig.events} == {("taken", "start")} and len(rig.events) == 3
    assert {one.role: one.pid for one in rig.events} == {role: one.process.pid for role, one in rig.members.items()}
    rig.turn(20)
    assert [*rig.board.lines] == [1] and not rig.fleet.killed


def test_a_host_whose_actors_start_late_has_none_too_many() -> None:
    """The planner could be on any host, but the actor that was started for it is on the first."""
    rig = Rig()
    rig.turn(1)
    late = [actor for actor in rig.fleet.actors.values() if actor.host == 0]
    for actor in late:
        actor.state = "stopped"
    rig.restart()
    rig.turn(20)
    rig.resume()
    rig.turn()
    rig.check()


@pytest.mark.parametrize("role", ROLES)
def test_an_actor_that_ends_is_replaced_by_a_standby_at_once(rig: Rig, role: str) -> None:
    before, made = dict(rig.members), rig.fleet.made
    rig.actor(role).state = "ended"
    rig.turn(2)
    assert rig.members[role].epoch == max(one.epoch for one in before.values()) + 1
    assert int(rig.members[role].actor.removeprefix("actor-")) <= made, "it was warm"
    assert {other: one for other, one in rig.members.items() if other != role} == {
        other: one for other, one in before.items() if other != role
    }
    assert rig.lost() == [(role, "ConnectionError")]
    rig.turn()
    rig.check()


@pytest.mark.parametrize("role", ROLES)
def test_an_actor_that_is_stopped_is_replaced_after_the_deadline_and_killed(rig: Rig, role: str) -> None:
    old = rig.members[role]
    rig.actor(role).state = "stopped"
    rig.turn(29)
    assert rig.members[role] == old
    rig.turn(4)
    assert rig.members[role].epoch > old.epoch
    ((killed, helper),) = rig.fleet.killed
    assert killed == old.actor and helper is not None
    assert rig.fleet.actors[helper].host == old.host, "Ray leaves a stopped process, so someone there must kill it"
    (lost,) = (one for one in rig.events if one.what == "lost")
    assert (lost.role, lost.why) == (role, "deadline") and 3 < lost.seconds < 3.3
    rig.turn()
    rig.check()


def test_the_view_is_published_before_the_old_one_is_killed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a supervisor that another one has superseded could kill actors that the other has made members."""
    rig.actor("host-0").state = "stopped"
    seen = list[int]()
    monkeypatch.setattr(rig.fleet, "kill", lambda *given: seen.append(max(rig.board.lines)))
    rig.turn(40)
    assert seen == [2]


def test_a_standby_that_ends_is_replaced(rig: Rig) -> None:
    standbys = [one for one in rig.fleet.actors.values() if one.role is None]
    standbys[0].state, standbys[1].state = "ended", "stopped"
    rig.turn(40)
    assert [*rig.board.lines] == [1] and sorted(rig.lost()) == [("standby", "ConnectionError"), ("standby", "deadline")]
    rig.check()


def test_actor_and_standby_may_end_together(rig: Rig) -> None:
    """All actors of a host at once, and then all of all hosts."""
    for actor in rig.fleet.actors.values():
        if actor.host == 1:
            actor.state = "ended"
    rig.turn(10)
    rig.check()
    for actor in rig.fleet.actors.values():
        actor.state = "ended"
    rig.turn(10)
    rig.check()


def test_a_standby_that_ends_while_it_takes_a_role_is_replaced(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    become = rig.fleet.become
    (standby,) = (one for one in rig.fleet.actors.values() if one.role is None and one.host == 0)

    def die(actor: str, role: str, epoch: int):  # type: ignore[no-untyped-def]
        if rig.fleet.actors[actor] is standby:
            standby.state = "ended"
        return become(actor, role, epoch)

    monkeypatch.setattr(rig.fleet, "become", die)
    rig.actor("host-0").state = "ended"
    rig.turn(10)
    rig.check()


def test_without_standbys_an_actor_is_started_when_it_is_needed() -> None:
    rig = Rig(standbys=0)
    rig.turn()
    rig.check()
    for role in ROLES:
        rig.actor(role).state = "ended"
        rig.turn(10)
        rig.check()


def test_a_stop_of_the_supervisor_itself_is_nobodys_death(rig: Rig) -> None:
    """Or of the whole machine: beats are late then, too."""
    view = rig.members
    for actor in rig.fleet.actors.values():
        actor.state = "stopped"
    rig.turn(5)
    rig.now += 100
    rig.resume()
    rig.turn(1)
    rig.turn(20)
    assert rig.members == view and not rig.lost()


def test_another_supervisor_finds_the_actors_and_gives_new_epochs(rig: Rig) -> None:
    before = dict(rig.members)
    rig.restart()
    rig.turn()
    rig.check()
    assert {role: one.actor for role, one in rig.members.items()} == {role: one.actor for role, one in before.items()}
    assert min(one.epoch for one in rig.members.values()) > max(one.epoch for one in before.values())
    assert not rig.fleet.killed


@pytest.mark.parametrize("state", ["ended", "stopped"])
def test_an_actor_that_died_without_a_supervisor_is_replaced(rig: Rig, state: str) -> None:
    """Only if it is dead: a warm standby must not take a role because it answers the first beat sooner."""
    old = rig.members["host-1"].actor
    rig.actor("host-1").state = state
    rig.restart()
    rig.turn(29)
    assert rig.members["host-0"].actor in rig.fleet.actors
    rig.turn(10)
    rig.check()
    assert rig.members["host-1"].actor != old and rig.fleet.actors[old].state == "ended"


def test_an_epoch_that_was_given_but_not_published_is_not_given_again(rig: Rig) -> None:
    """The supervisor died between the two."""
    (standby,) = (name for name, one in rig.fleet.actors.items() if one.role is None and one.host == 0)
    rig.fleet.become(standby, "host-0", 77)
    rig.restart()
    rig.turn(2)
    rig.actor("host-1").state = "ended"
    rig.turn()
    assert rig.members["host-1"].epoch > 77


def test_a_supervisor_that_was_superseded_ends(rig: Rig) -> None:
    """It went on after a stop, and takes all actors for dead. The actors that it would replace live on."""
    old = rig.supervisor
    rig.restart()
    rig.turn()
    view = dict(rig.members)
    rig.actor("planner").state = "ended"
    with pytest.raises(SupersededError):
        for turn in range(10):
            old.turn(rig.now + turn / 10)
    assert rig.members == view and not rig.fleet.killed


def test_a_host_on_which_no_actor_starts_ends_the_run() -> None:
    rig = Rig(fleet=MemoryFleet(starts=False))
    with pytest.raises(PreflightError, match="host"):
        rig.turn(10)
    assert rig.fleet.made < 20


@pytest.mark.parametrize("role", ROLES)
def test_a_role_that_no_actor_survives_ends_the_run(rig: Rig, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors that are warm, and die while they take it. Those that answer beats meanwhile change nothing."""
    become, made = rig.fleet.become, rig.fleet.made

    def die(actor: str, taken: str, epoch: int):  # type: ignore[no-untyped-def]
        if taken == role:
            rig.fleet.actors[actor].state = "ended"
        return become(actor, taken, epoch)

    monkeypatch.setattr(rig.fleet, "become", die)
    rig.actor(role).state = "ended"
    with pytest.raises(PreflightError, match=role):
        rig.turn(30)
    assert rig.fleet.made < made + 6


def test_actors_that_die_while_they_take_a_role_are_counted_until_one_has_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    become, calls = rig.fleet.become, list[str]()

    def die_twice(actor: str, role: str, epoch: int):  # type: ignore[no-untyped-def]
        calls.append(actor)
        if len(calls) % 3:
            rig.fleet.actors[actor].state = "ended"
        return become(actor, role, epoch)

    monkeypatch.setattr(rig.fleet, "become", die_twice)
    for _ in range(3):
        rig.actor("host-1").state = "ended"
        rig.turn(20)
        rig.check()
    assert len(calls) == 9


def test_the_end_kills_all_when_one_of_each_host_has_removed_its_files(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that write them, when all others have ended."""
    clean, ended = rig.fleet.clean, list[int]()

    def note(actor: str) -> Future[None]:
        ended.append(len(rig.fleet.killed))
        return clean(actor)

    monkeypatch.setattr(rig.fleet, "clean", note)
    rig.supervisor.end()
    assert {one.state for one in rig.fleet.actors.values()} == {"ended"}
    assert sorted(rig.fleet.cleaned) == sorted(rig.members[f"host-{host}"].actor for host in (0, 1))
    assert ended == [len(rig.fleet.actors) - 2] * 2


def test_the_end_does_not_wait_for_an_actor_that_is_stopped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_CLEAN_S", 0.1)
    rig.actor("host-1").state = "stopped"
    rig.supervisor.end()
    assert {one.state for one in rig.fleet.actors.values()} == {"ended"}
    assert rig.fleet.cleaned == [rig.members["host-0"].actor]


@pytest.mark.parametrize("seed", range(20))
def test_any_faults_at_any_moment_end_in_a_complete_view(seed: int) -> None:
    drawn, rig = random.Random(seed), Rig(standbys=seed % 3)
    for _ in range(60):
        rig.turn(1)
        actor = drawn.choice([one for one in rig.fleet.actors.values() if one.state != "ended"])
        fault = drawn.choice(["ended", "stopped", "runs", "restart", "pause", None])
        if fault == "restart":
            rig.restart()
        elif fault == "pause":
            rig.now += drawn.uniform(0, 9)
        elif fault == "runs" and actor.state == "stopped":
            actor.state = "runs"
            for answer in actor.waiting:
                answer()
            actor.waiting.clear()
        elif fault in ("ended", "stopped"):
            actor.state = fault
        rig.turn(drawn.randrange(12))
    for actor in rig.fleet.actors.values():
        if actor.state == "stopped":
            actor.state = "ended"
            for answer in actor.waiting:
                answer()
    rig.turn(50)
    rig.check()
