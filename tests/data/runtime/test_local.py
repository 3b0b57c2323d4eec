"""A process of each node plans ahead, for all its ranks; what it plans is what planning in place gives."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.control.control import Control
from engine.data import order
from engine.data.opening import open_run
from engine.data.order import ORDER
from engine.data.overview import Corpora
from engine.data.runtime.local import LocalRuntime
from engine.data.runtime.planner import StepPlanner, received_step
from engine.data.runtime.process import PlanningProcess
from engine.data.steps import Cursor
from engine.errors import BytescaleError, DataError
from engine.job import Job
from engine.launch.prepare import write_facts
from engine.planner.make import plan_step
from engine.run.folder import RunFolder
from engine.simulator.facts import outcome
from engine.simulator.timeline import balance, simulate
from tests import world
from tests.data.resuming import columns, cursor_of, resumes_exactly
from tests.refusals import refused

pytestmark = pytest.mark.long

FORKED = pytest.mark.usefixtures("forked")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run of small documents, of which nothing has been packed."""
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.py").write_text("x" * (37 * number + 1))
    places = [f"data.path={tmp_path / 'texts'}", f"data.cache={tmp_path / 'cache'}", "data.validation_share=0.2"]
    sizes = ["context=256", "capacity=128", "batch_tokens=512", "cluster.ranks_per_node=3"]
    return load(["recipe=quickstart", "data.encoding=utf-8", *sizes, *places])


@pytest.fixture
def folder(tmp_path: Path, config: Config) -> RunFolder:
    """The run folder, as the launcher prepares it for documents that it does not count."""
    made = RunFolder(tmp_path / "run")
    made.root.mkdir()
    corpora = Corpora(config)
    corpora.are_few = False  # else it would count them
    write_facts(made, config, corpora, 0)
    return made


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork planning processes from the server of worlds, which has imported everything.

    Not for tests of their imports, children or semaphores.
    """
    monkeypatch.setattr("engine.data.runtime.process._CONTEXT", world._CONTEXT)


@contextmanager
def planning(folder: RunFolder, config: Config, sockets: Sequence[int] = (), rank: int = 0) -> Iterator[LocalRuntime]:
    with closing(LocalRuntime(folder, Job(config), Control(rank), sockets, rank == 0)) as ahead:
        yield ahead


@contextmanager
def node(
    folder: RunFolder, config: Config, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LocalRuntime, LocalRuntime, LocalRuntime]]:
    """The plans of the first rank of a node and of two others, all in this process."""
    pairs = [[end.detach() for end in socket.socketpair()] for _ in range(2)]
    with ExitStack() as ranks:
        first = ranks.enter_context(planning(folder, config, [mine for mine, _ in pairs]))
        others = [
            ranks.enter_context(planning(folder, config, [theirs], rank)) for rank, (_, theirs) in enumerate(pairs, 1)
        ]
        yield first, others[0], others[1]


@FORKED
def test_plans_are_those_that_planning_in_place_gives(folder: RunFolder, config: Config) -> None:
    """With a step and a validation set that nobody has packed before."""
    elsewhere = config.model_copy(update={"data": config.data.model_copy(update={"cache": f"{folder.root}/other"})})
    steps, settings, cursor = Corpora(elsewhere).steps, Job(config).settings, Cursor()
    with planning(folder, config) as ahead:
        expected_sets = steps.validation(ORDER)
        found_sets = ahead.validation(ORDER)
        assert found_sets.keys() == expected_sets.keys() == {"data"}
        assert np.array_equal(found_sets["data"].table.length, expected_sets["data"].length)
        ahead.request(cursor)
        for _ in range(6):
            found, planned = steps.next(cursor), ahead.take()
            assert found is not None and planned.ended is None
            table, cursor = found
            ahead.request(planned.after)
            expected = plan_step(table.length, settings)
            assert planned.plan.digest == expected.digest
            assert planned.balance == balance(expected, settings)
            simulated = outcome(expected, settings, simulate(expected, settings))
            assert planned.step_s == simulated["step_s"], "as `bytescale simulate` shows it"
            assert planned.flops == settings.costs.flops(table.length)
            assert np.array_equal(planned.table.length, table.length) and planned.after == cursor


def process_of(ahead: LocalRuntime) -> PlanningProcess:
    assert ahead._answers.process is not None
    return ahead._answers.process


def test_all_ranks_of_a_node_get_the_same_from_one_process(
    folder: RunFolder, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the process is killed, and whoever asks first: nobody needs to ask in time."""
    children = psutil.Process().children
    before = len(children())
    with node(folder, config, monkeypatch) as ranks:
        assert len(children()) == before + 1
        sets = [ahead.validation(ORDER)["data"] for ahead in ranks]
        assert len({one.plan.digest for one in sets}) == 1
        cursor = Cursor()
        for step in range(4):
            for ahead in ranks if step % 2 else reversed(ranks):
                ahead.request(cursor)
            if step == 2:
                process_of(ranks[0]).process.kill()
            planned = [ahead.take() for ahead in ranks]
            assert {one.plan.digest for one in planned} == {planned[0].plan.digest}
            assert all(np.array_equal(one.table.length, planned[0].table.length) for one in planned)
            assert all(one.after == planned[0].after for one in planned)
            cursor = planned[0].after


@FORKED
def test_an_error_of_planning_reaches_all_ranks_of_a_node(
    folder: RunFolder, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path(config.data.path) / "7.py").write_bytes(b"\xff")
    with node(folder, config, monkeypatch) as ranks:
        for ahead in ranks:
            ahead.request(Cursor())
            with refused(DataError, ".../texts/7.py"):
                ahead.take()


@FORKED
def test_a_rank_of_a_node_that_ends_is_noticed(
    folder: RunFolder, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(folder, config, monkeypatch) as (first, other, ended):
        for ahead in (first, other):
            ahead.request(Cursor())
        ended.close()
        with pytest.raises(ConnectionError):
            first.take()
        other.take()  # what was sent is still there
        first.close()
        other.request(Cursor())
        with pytest.raises(ConnectionError, match="the first rank of this node, which plans for it, has ended"):
            other.take()


@FORKED
def test_the_end_of_the_documents_is_passed_on(folder: RunFolder, config: Config) -> None:
    once = config.model_copy(update={"data": config.data.model_copy(update={"exhausted": "stop"})})
    with planning(folder, once) as ahead:
        cursor, ended = Cursor(), None
        while ended is None:
            ahead.request(cursor)
            planned = ahead.take()
            cursor, ended = planned.after, planned.ended
    assert ended == "all documents were used; set data.exhausted=repeat to use them again"
    taken, trained = cursor.tokens, Corpora(once).overview
    assert trained is not None and trained.validation > 0
    lengths = [37 * number + 2 for number in range(20)]
    assert max(lengths) < taken < sum(lengths)


@FORKED
def test_documents_that_cannot_be_packed_are_an_error_of_the_rank(folder: RunFolder, config: Config) -> None:
    (Path(config.data.path) / "7.py").write_bytes(b"\xff")
    with planning(folder, config) as ahead:
        ahead.request(Cursor())
        with refused(DataError, ".../texts/7.py"):
            ahead.take()


def test_no_process_is_left(folder: RunFolder, config: Config) -> None:
    before = set(psutil.Process().children(recursive=True))
    with planning(folder, config) as ahead:
        ahead.request(Cursor())
        ahead.take()
        started = set(psutil.Process().children(recursive=True)) - before
        assert len(started) >= 2, "the planning process and a loader"
    _, left = psutil.wait_procs(started, timeout=10)
    assert not [process for process in left if "resource_tracker" not in " ".join(process.cmdline())]


def test_the_planning_process_imports_no_torch(folder: RunFolder, config: Config) -> None:
    """It must stay small."""
    with planning(folder, config) as ahead:
        ahead.validation(ORDER)
        ahead.request(Cursor())
        ahead.take()
        mapped = Path(f"/proc/{process_of(ahead).process.pid}/maps").read_text()
        assert "numpy" in mapped and "torch" not in mapped


@FORKED
def test_a_planning_process_that_is_killed_is_replaced_and_the_plans_stay_the_same(
    folder: RunFolder, config: Config
) -> None:
    """Before it is asked, while it plans, and when its answer waits to be read."""
    moments = cycle(["before", "planning", "answered"])

    class Killed:
        """Steps of one runtime. The process that plans is killed once after each resume, before or in the step."""

        def __init__(self, ahead: LocalRuntime, state: Any | None) -> None:
            self._ahead, self._cursor = ahead, cursor_of(state)
            self._moment = next(moments) if state is not None else "never"

        def state(self) -> Any:
            return self._cursor.to_json()

        def take(self) -> Any:
            moment, self._moment = self._moment, "never"
            if moment == "before":
                process_of(self._ahead).process.kill()
                process_of(self._ahead).process.join()
            self._ahead.request(self._cursor)
            if moment == "answered":
                assert process_of(self._ahead)._connection.poll(60)
            if moment in ("answered", "planning"):
                process_of(self._ahead).process.kill()
            planned = self._ahead.take()
            self._cursor = planned.after
            sets = {name: one.plan.digest for name, one in self._ahead.validation(ORDER).items()}
            return columns(planned.table), planned.plan.digest, planned.balance, planned.ended, sets

    with planning(folder, config) as ahead:
        resumes_exactly(lambda state: Killed(ahead, state), most=3, ahead=1)


@FORKED
def test_a_planning_process_that_is_stopped_is_replaced(
    folder: RunFolder, config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody else would notice, and the rank wait for its plan. Its loaders are stopped with it, and end."""
    monkeypatch.setattr("engine.control.processes.STOPPED_S", 0.5)
    with planning(folder, config) as ahead:
        victim = psutil.Process(process_of(ahead).process.pid)
        ahead.request(Cursor())
        expected = ahead.take()
        victim.suspend()
        ahead.request(Cursor())
        found = ahead.take()
        assert found.plan.digest == expected.plan.digest and not victim.is_running()
    assert [record.getMessage() for record in caplog.records if "planning" in record.getMessage()] == [
        "the planning process was stopped by a signal; another one plans this step again"
    ]


def test_a_stopped_planning_process_does_not_delay_the_end(
    folder: RunFolder, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.data.runtime.process._CLOSE_S", 0.2)
    with planning(folder, config) as ahead:
        ahead.request(Cursor())
        ahead.take()
        family = psutil.Process(process_of(ahead).process.pid)
        family = [family, *family.children(recursive=True)]
        family[0].suspend()
    _, left = psutil.wait_procs(family, timeout=20)
    assert len(family) > 1 and not left, "neither it nor its loaders"


@FORKED
@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, 10), (signal.SIGSTOP, 124)])
def test_planning_processes_that_die_of_a_step_end_the_rank(
    folder: RunFolder, config: Config, how: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.control.processes.STOPPED_S", 0.5)
    with planning(folder, config) as ahead:
        process = process_of(ahead)
        ask = process.ask

        def kill_after(*question: Any) -> None:
            ask(*question)
            os.kill(process.process.pid or 0, how)

        monkeypatch.setattr(process, "ask", kill_after)
        ahead.request(Cursor())
        with pytest.raises(BytescaleError, match=", 3 times in one step") as caught:
            ahead.take()
        assert caught.value.code == code


def test_a_run_has_no_semaphores(folder: RunFolder, config: Config) -> None:
    """They are files in /dev/shm. If a run is killed with all its processes, nobody is left who removes them."""

    def semaphores() -> set[str]:
        us, maps = psutil.Process(), ""
        for one in (us, *us.children(recursive=True)):
            with suppress(OSError):  # a loader of an earlier test that ends now
                maps += Path(f"/proc/{one.pid}/maps").read_text()
        return {line.split()[5] for line in maps.splitlines() if "/sem." in line}

    before = semaphores()
    with planning(folder, config) as ahead:
        ahead.request(Cursor())
        ahead.take()
        assert semaphores() == before


def test_documents_that_cannot_be_used_come_with_the_first_step_after_their_block_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the first window, a file, with the first step, and those of a later one when a step reaches it."""
    monkeypatch.setattr(order, "WINDOW_BYTES", 1)
    text = "\n".join("{" if number % 5 == 0 else f'{{"text": "{number:09d}"}}' for number in range(200))
    for number in range(6):
        (tmp_path / f"{number}.jsonl").write_text(text)
    places = [f"data.path={tmp_path / '*.jsonl'}", f"data.cache={tmp_path / 'cache'}", "data.quarantine_after=2"]
    config = load(["recipe=quickstart", "data=jsonl", *places, "batch_tokens=1K", "data.validation_tokens=0"])
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    write_facts(folder, config, Corpora(config), 0)
    planner, met, cursor = StepPlanner(open_run(folder, config), Job(config)), list[int](), Cursor(order=ORDER)
    while cursor.tokens < 9000:
        planned = received_step(planner.step(cursor))
        cursor, unusable = planned.after, planned.unusable
        met.append(len(unusable))
        assert all(one.place.startswith(str(tmp_path)) and one.reason for one in unusable)
    assert met[0] == 40 and [count for count in met if count] == [40, 40, 2 * 40, 2 * 40]
