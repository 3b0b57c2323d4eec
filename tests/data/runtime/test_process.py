"""A planning process is replaced whatever it plans, and its answers reach all ranks of a node."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import pytest

from engine.data.runtime.node import NodeAnswers
from engine.data.runtime.process import PlanningProcess
from engine.errors import BytescaleError, DataError
from tests import world


class Squares:
    """Answers that need no documents. A question removes a line of the file `deadly`, a signal to this process."""

    def __init__(self, deadly: Path) -> None:
        self._deadly = deadly

    def square(self, number: int) -> int:
        lines = self._deadly.read_text().splitlines()
        if lines:
            self._deadly.write_text("\n".join(lines[1:]))
            os.kill(os.getpid(), int(lines[0]))
        return number**2

    def refuse(self) -> None:
        raise DataError("cannot be used", key="a.txt")

    def processors(self) -> set[int]:
        return os.sched_getaffinity(0)

    def close(self) -> None:
        self._deadly.with_name("closed").touch()


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.data.runtime.process._CONTEXT", world._CONTEXT)
    monkeypatch.setattr("engine.control.processes.STOPPED_S", 0.5)


@pytest.fixture
def deadly(tmp_path: Path) -> Path:
    (tmp_path / "deadly").write_text("")
    return tmp_path / "deadly"


@pytest.fixture
def process(deadly: Path) -> Iterator[PlanningProcess]:
    with closing(PlanningProcess(partial(Squares, deadly))) as found:
        yield found


def test_it_runs_where_the_agent_may_though_its_rank_is_bound(deadly: Path) -> None:
    """It and its loaders work for all ranks of the host. Here the parent of this process stands for the agent."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        with closing(PlanningProcess(partial(Squares, deadly))) as process:
            process.ask(Squares.processors)
            assert process.answer() == (True, os.sched_getaffinity(os.getppid()))
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGABRT])
def test_a_process_that_dies_of_a_question_is_asked_again(process: PlanningProcess, deadly: Path, how: int) -> None:
    deadly.write_text(f"{int(how)}\n{int(how)}")
    process.ask(Squares.square, 5)
    assert process.answer() == (True, 25) and deadly.read_text() == ""


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, 10), (signal.SIGSTOP, 124), (signal.SIGABRT, 134)])
def test_processes_that_die_three_times_of_a_question_are_an_error(
    process: PlanningProcess, deadly: Path, how: int, code: int
) -> None:
    deadly.write_text("\n".join([str(int(how))] * 3))
    process.ask(Squares.square, 5)
    with pytest.raises(BytescaleError) as caught:
        process.answer()
    assert caught.value.code == code


def test_an_error_is_an_answer_and_the_process_stays(process: PlanningProcess) -> None:
    pid = process.process.pid
    process.ask(Squares.refuse)
    done, error = process.answer()
    assert not done and isinstance(error, DataError) and error.problems[0].key == "a.txt"
    process.ask(Squares.square, 3)
    assert process.answer() == (True, 9) and process.process.pid == pid


def test_what_answers_is_closed_with_the_process(process: PlanningProcess, deadly: Path) -> None:
    process.ask(Squares.square, 2)
    process.answer()
    process.close()
    assert deadly.with_name("closed").exists() and not process.process.is_alive()


def test_answers_and_errors_reach_all_ranks_of_a_node(deadly: Path) -> None:
    pairs = [[end.detach() for end in socket.socketpair()] for _ in range(2)]
    with ExitStack() as stack:
        make = partial(Squares, deadly)
        given = [([mine for mine, _ in pairs], True), *(([theirs], False) for _, theirs in pairs)]
        ranks = [stack.enter_context(closing(NodeAnswers(make, sockets, first))) for sockets, first in given]
        assert [rank.process is not None for rank in ranks] == [True, False, False]
        for rank in ranks:
            rank.ask(Squares.square, 7)
        assert [rank.answer() for rank in ranks] == [49] * 3
        for rank in ranks:
            rank.ask(Squares.refuse)
            with pytest.raises(DataError):
                rank.answer()
        ranks[0].close()
        with pytest.raises(ConnectionError):
            ranks[1].answer()
