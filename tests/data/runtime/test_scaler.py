"""The number of loaders follows what is announced and what blocks cost; which documents steps have does not.

Loaders and the clock are those of the test; benchmarks/scaling.py has real loaders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import pytest

from engine.config.load import load
from engine.config.schema import Segment
from engine.data import order, steps
from engine.data.blocks.blocks import BlockId
from engine.data.blocks.work import Cost
from engine.data.runtime import scaler
from engine.data.runtime.events import read_events
from engine.data.runtime.scaler import Scaler, loader_bounds
from engine.data.sequences import SequenceTable
from engine.data.steps import Cursor
from engine.run.folder import RunFolder
from tests.data.memory import Memory, MemoryLengths, config_of, same, steps_of

FAST, SLOW = 0.25, 2.5  # time of a block, in steps
TOKENS = 1000  # of a block, and of a step
LOADERS = 6


class Timed(Memory):
    """A source in memory, whose blocks are there when a loader has packed them."""

    def __init__(self, name: str, pool: TimedPool) -> None:
        super().__init__([[TOKENS // 20] * 20] * 100, name, bytes_=TOKENS)
        self._pool = pool

    def lengths(self, block: int) -> MemoryLengths:
        self._pool.wait(BlockId(self.name, block))
        return super().lengths(block)


class TimedPool:
    """Loaders that need `seconds(source, now)` for a block that they begin then. Time is what `advance` says."""

    def __init__(self, seconds: Callable[[str, float], float]) -> None:
        self._seconds, self.loaders, self.now = seconds, LOADERS, 0.0
        self._queue, self._packed, self._costs = list[BlockId](), set[BlockId](), dict[str, Cost]()
        self._running = dict[BlockId, tuple[float, float]]()  # begin and end of each block
        self.begun = list[tuple[float, str]]()

    def ask(self, blocks: Iterable[BlockId]) -> None:
        self._queue = [block for block in blocks if block not in self._packed and block not in self._running]
        self._begin()

    def resize(self, loaders: int) -> None:
        self.loaders = loaders
        self._begin()

    def missing(self) -> set[BlockId]:
        return {*self._queue, *self._running}

    def running(self) -> list[tuple[str, float]]:
        return [(block.source, self.now - begin) for block, (begin, _) in self._running.items()]

    def packed(self) -> dict[str, Cost]:
        costs, self._costs = self._costs, {}
        return costs

    def wait(self, block: BlockId) -> None:
        """Let time pass until a block is packed. It is packed next if no loader has begun it."""
        if block not in self._packed and block not in self._running:
            self._queue = [block, *(other for other in self._queue if other != block)]
            self._begin()
        while block not in self._packed:
            self.advance(min(end for _, end in self._running.values()))

    def advance(self, now: float) -> None:
        """Let time pass. Loaders that are too many begin no other block."""
        while self._running and (first := min(self._running.items(), key=lambda item: item[1][1]))[1][1] <= now:
            block, (begin, self.now) = first
            del self._running[block]
            self._packed.add(block)
            cost = Cost(1, 20, TOKENS, TOKENS, self.now - begin, 0)
            self._costs[block.source] = self._costs.get(block.source, Cost()).plus(cost)
            self._begin()
        self.now = now

    def _begin(self) -> None:
        while self._queue and len(self._running) < self.loaders:
            block = self._queue.pop(0)
            self._running[block] = self.now, self.now + self._seconds(block.source, self.now)
            self.begun.append((self.now, block.source))


@dataclass
class TimedRun:
    """A run whose steps take 1, and wait for their blocks. All but `begun` have a row for each step."""

    loaders: list[int]
    waits: list[float]
    tables: list[SequenceTable]
    begun: list[tuple[float, str]]  # when a loader began a block, and its source

    @classmethod
    def of(cls, count: int, mix: list[Segment], seconds: Callable[[str, float], float], folder: RunFolder) -> TimedRun:
        pool = TimedPool(seconds)
        planner = steps_of([Timed("a", pool), Timed("b", pool)], config_of(TOKENS, TOKENS), mix)
        sizes = Scaler(pool, 1, LOADERS, folder, 0, lambda: pool.now)
        run, cursor = cls([], [], [], pool.begun), Cursor()
        for _ in range(count):
            start = pool.now
            windows = list(planner.windows_ahead(cursor))
            pool.ask(block for window in windows for block in window.blocks)
            sizes.step(planner, cursor, windows)
            run.loaders.append(pool.loaders)
            found = planner.next(cursor)
            assert found is not None
            table, cursor = found
            run.tables.append(table)
            run.waits.append(pool.now - start)
            pool.advance(pool.now + 1)
            sizes.packed(pool.packed())
        return run


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 4 blocks."""
    monkeypatch.setattr(order, "WINDOW_BYTES", 1)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def test_the_number_of_loaders_is_fixed_or_limited_by_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dict[int, tuple[int, int]]()
    for cores in (1, 4, 64):
        monkeypatch.setattr(scaler, "cores", lambda cores=cores: cores)
        found[cores] = loader_bounds(load(["recipe=quickstart"]).data)
    assert found == {1: (1, 1), 4: (1, 2), 64: (1, 8)}
    assert loader_bounds(load(["recipe=quickstart"]).data, hosts=3) == (3, 24)
    assert loader_bounds(load(["recipe=quickstart", "data.loaders=20"]).data, hosts=3) == (60, 60)


def test_a_weight_that_rises_has_its_loaders_before(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 5 to 80 % in step 40, until step 60, of a source whose blocks take 2.5 steps each."""
    mix = [Segment(weights={"a": 95, "b": 5}), Segment(step=40, weights={"a": 20, "b": 80})]
    mix.append(Segment(step=60, weights=mix[0].weights))
    run = TimedRun.of(90, mix, rising, folder)
    assert max(run.loaders[15:25]) == 1 < max(run.loaders[25:40])
    assert max(run.loaders[40:60]) > 2 and max(run.loaders[65:]) == 1
    assert max(run.waits[1:]) <= 0.2
    # The documents are those of a run without loaders. One that does not look further ahead waits.
    assert all(map(same, run.tables, TimedRun.of(90, mix, lambda *_: 0.0, folder).tables))
    monkeypatch.setattr(steps, "RISE_STEPS", 1)
    assert max(TimedRun.of(90, mix, rising, folder).waits[1:]) > 0.2


def rising(source: str, _: float) -> float:
    return SLOW if source == "b" else FAST


def test_a_source_that_becomes_slow_gets_more_loaders_and_gives_them_back(folder: RunFolder) -> None:
    """A block takes 2.5 steps from step 30 to step 60. Steps count from the first slow block that is begun."""
    run = TimedRun.of(
        90, [Segment(weights={"a": 1, "b": 1})], lambda source, now: SLOW if becomes_slow(source, now) else FAST, folder
    )
    first, *_, last = (int(now) for now, source in run.begun if becomes_slow(source, now))
    assert max(run.loaders[15 : first + 1]) == 1 < max(run.loaders[first + 1 : first + 6])
    assert last < 60 and max(run.loaders[last + ceil(SLOW) + 5 :]) == 1
    assert max(run.waits[1:]) <= 0.2
    events = read_events(folder)
    assert {event["source"] for event in events if first <= event["step"] < 60 and event["after"] > 1} == {"b"}
    assert all(run.loaders[event["step"]] == event["after"] != event["before"] for event in events)


def becomes_slow(source: str, now: float) -> bool:
    return source == "b" and 30 <= now < 60
