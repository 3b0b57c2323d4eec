"""An actor answers calls of its epoch, with the role that it was given."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from engine.control.processes import start_of
from engine.errors import DataError
from engine.remote.actor import Actor
from engine.remote.caller import Answer, Caller
from engine.remote.view import Process

ERRORS = {"broken": DataError("cannot be opened"), "full": OSError(errno.ENOSPC, "No space left on device")}


class Counter:
    """A role that counts, and fails when it is asked to."""

    closed = 0

    def __init__(self, role: str, epoch: int, caller: Caller, scratch: Path) -> None:
        if role in ERRORS:
            raise ERRORS[role]
        self.role, self.epoch, self.count = role, epoch, 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def fail(self) -> None:
        raise ValueError("no")

    def close(self) -> None:
        Counter.closed += 1


def broken() -> None:
    """A run whose config or compiled code cannot be read: each role reports it."""
    raise OSError(errno.EIO, "cannot be read")


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Actor]:
    main = sys.modules["__main__"]
    if hasattr(main, "__file__"):
        monkeypatch.setattr(main, "__file__", main.__file__)  # an actor removes it
    Counter.closed = 0
    yield Actor(SimpleNamespace(make=Counter, warm=broken), lambda: (cast(Caller, None), Path("/nowhere")))


def test_without_a_role_no_epoch_is_answered(actor: Actor) -> None:
    assert actor.answer(1, "add", (1,)) == Answer(None, None)
    assert actor.beat() == (Process(os.getpid(), start_of(os.getpid()) or 0), 0)


def test_only_calls_of_its_epoch_are_answered(actor: Actor) -> None:
    actor.become("counter", 5)
    assert actor.answer(5, "add", (2,)) == Answer(5, 2)
    assert actor.answer(4, "add", (2,)) == actor.answer(6, "add", (2,)) == Answer(None, None)
    assert actor.beat().epoch == 5


def test_another_epoch_of_the_same_role_keeps_what_it_has(actor: Actor) -> None:
    actor.become("counter", 5)
    actor.answer(5, "add", (2,))
    actor.become("counter", 7)
    assert actor.answer(7, "add", (1,)) == Answer(7, 3) and actor.answer(5, "add", (1,)).epoch is None
    actor.become("other", 8)
    assert actor.answer(8, "add", (1,)) == Answer(8, 1) and Counter.closed == 1


def test_errors_are_answers(actor: Actor) -> None:
    actor.become("counter", 5)
    found = actor.answer(5, "fail", ())
    assert found.epoch == 5 and isinstance(found.error, ValueError)


@pytest.mark.parametrize("role", [*ERRORS])
def test_a_role_that_cannot_be_taken_is_the_error_of_each_call(actor: Actor, role: str) -> None:
    """Only the process that needs the role reports it, with the exit code of its error, whatever it is."""
    actor.become(role, 5)
    for _ in range(2):
        assert actor.answer(5, "add", (1,)) == Answer(5, None, ERRORS[role])
    actor.become("counter", 6)
    assert actor.answer(6, "add", (1,)) == Answer(6, 1)


def test_files_of_the_run_on_a_host_are_removed_by_any_of_its_actors(actor: Actor, tmp_path: Path) -> None:
    actor._surroundings = lambda: (cast(Caller, None), tmp_path / "run")
    for role in ("", "counter"):
        (tmp_path / "run" / "host-0" / "epoch-5").mkdir(parents=True)
        if role:
            actor.become(role, 5)
        actor.clean()
        assert not [*tmp_path.iterdir()] and Counter.closed == len(role[:1])


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_is_killed_only_if_it_is_the_same(actor: Actor, stopped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = start_of(process.pid)
        assert started is not None
        if stopped:
            process.send_signal(signal.SIGSTOP)
        actor.kill(Process(process.pid, started + 1))
        assert process.poll() is None
        actor.kill(Process(process.pid, started))
        assert process.wait(10) == -signal.SIGKILL
    actor.kill(Process(process.pid, started))
    assert start_of(process.pid) is None
