"""The number of loaders follows what is announced and what blocks cost; which documents steps have does not."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.config.load import load
from engine.config.schema import Config
from engine.data import order
from engine.data.blocks.blocks import BlockId
from engine.data.blocks.loaders import Loaders
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.packed import Packed
from engine.data.blocks.texts import Texts
from engine.data.opening import open_sources
from engine.data.runtime.events import read_events
from engine.data.runtime.scaler import Scaler
from engine.data.sources.source import Block, Document
from engine.data.steps import Cursor, SequenceTable, Steps
from engine.run.folder import RunFolder
from tests.data.memory import same

pytestmark = pytest.mark.long

STEP_S = 0.02  # on the clock of the test
FAST_S, SLOW_S = 0.005, 0.05  # processor time of a block
TOKENS = 1000  # of a block, and of a step
LOADERS = 6


@dataclass(frozen=True)
class Metered(Block):
    """Documents of together TOKENS inputs. Reading them waits for a file, which says how long it takes."""

    path: Path

    @property
    def files(self) -> list[str]:
        return [str(self.path)]

    @property
    def size(self) -> int:
        return TOKENS

    def let(self, seconds: float) -> None:
        """Let a loader read it, with so much processor time."""
        new = self.path.with_suffix(".new")
        new.write_text(str(seconds))
        new.rename(self.path.with_suffix(".go"))

    def documents(self) -> Iterator[Document]:
        while not self.path.with_suffix(".go").exists():
            time.sleep(0.001)
        end = time.process_time() + float(self.path.with_suffix(".go").read_text())
        while time.process_time() < end:
            pass
        for number, line in enumerate(self.path.read_bytes().splitlines()):
            yield Document(f"{self.path}:{number}", line)


@dataclass
class Run:
    """A run of steps of STEP_S. Blocks take what `seconds` says for their source at the step that is planned."""

    config: Config
    folder: RunFolder
    listed: dict[str, list[Block]]
    scaled: bool = True
    step: int = 0
    loaders: list[int] = field(default_factory=list)  # of each step
    stalls: list[float] = field(default_factory=list)  # of each step, in steps
    begun: list[tuple[int, str]] = field(default_factory=list)  # step and source of each block
    tables: list[SequenceTable] = field(default_factory=list)

    def seconds(self, source: str) -> float:
        raise NotImplementedError

    def go(self, steps: int) -> None:
        run, pool = self, Loaders(LOADERS, 1 << 40)

        class Blocks(LocalBlocks):
            def lengths(self, block: BlockId) -> Packed:
                if not self.is_packed(block):  # the step waits until it is
                    seconds = run.let(pool, self, None, block)
                    texts = self._texts[block.source]
                    if not self.is_packed(block):  # it was not asked for, so it is packed here
                        texts.blocks[block.block].let(run.seconds(block.source))  # type: ignore[attr-defined]
                        seconds += run.seconds(block.source)
                    run.stalls[-1] += seconds / self.loaders / STEP_S
                return super().lengths(block)

        made = list[Blocks]()

        def make(texts: Mapping[str, Texts]) -> Blocks:
            made.append(Blocks(texts, pool))
            return made[0]

        sources = open_sources(self.config.data, self.listed, make_blocks=make)
        planner, cursor, time_left = Steps(sources.corpora, self.config), Cursor(), 0.0
        with closing(made[0]) as blocks:
            scaler = Scaler(blocks, 1, LOADERS, self.folder, 0, lambda: self.step * STEP_S)
            for self.step in range(steps):
                blocks.ask(planner.upcoming(cursor, 4 * TOKENS))
                if self.scaled:
                    scaler.step(planner, cursor)
                self.loaders.append(blocks.loaders)
                self.stalls.append(0.0)
                found = planner.next(cursor)
                assert found is not None
                table, cursor = found
                self.tables.append(table)
                # While the step runs, its loaders have this time.
                time_left += blocks.loaders * STEP_S
                time_left -= self.let(pool, blocks, time_left, None)
                if not pool.missing():
                    time_left = 0.0
                scaler.packed(blocks.packed())

    def let(self, pool: Loaders, blocks: LocalBlocks, most: float | None, last: BlockId | None) -> float:
        """Let loaders pack the next blocks, for `most` seconds, or until `last`; return how long that takes them."""
        total = 0.0
        for work in pool.missing():
            seconds = self.seconds(work.source)
            if most is not None and total + seconds > most:
                break
            total += seconds
            self.begun.append((self.step, work.source))
            assert isinstance(work.block, Metered)
            work.block.let(seconds)
            pool.wait(work.part())
            if last is not None and (work.source, work.number) == last:
                break
        return total


class Slowed(Run):
    """Source b takes 10 times as long from step 30 to step 60."""

    def seconds(self, source: str) -> float:
        return SLOW_S if source == "b" and 30 <= self.step < 60 else FAST_S


class Rising(Run):
    """A block of b takes a step, all the time; its weight is 5 %, and 80 % from step 40 on until step 60."""

    def seconds(self, source: str) -> float:
        return STEP_S if source == "b" else FAST_S


def make(kind: type[Run], tmp_path: Path, mix: str, scaled: bool = True) -> Run:
    """Make a run in a folder, whose sources a and b have the same documents in each run."""
    (tmp_path / "run").mkdir(parents=True)
    listed = dict[str, list[Block]]()
    for name in "ab":
        listed[name] = []
        for number in range(100):
            path = tmp_path / f"{name}{number}.txt"
            path.write_text("\n".join(f"{name} {number} {line}".ljust(48, ".") for line in range(20)))
            listed[name].append(Metered(path))
    sources = [f"data.sources.{name}.path={tmp_path}/{name}*.txt" for name in "ab"]
    sizes = ["context=64", "capacity=64", f"batch_tokens={TOKENS}", "data.validation_share=0"]
    places = [f"data.cache={tmp_path / 'cache'}", f"data.mix={mix}"]
    return kind(load(["recipe=quickstart", *sources, *sizes, *places]), RunFolder(tmp_path / "run"), listed, scaled)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of 4 blocks."""
    monkeypatch.setattr(order, "WINDOW_BYTES", 1)


def test_a_source_that_becomes_slow_gets_more_loaders_and_gives_them_back(tmp_path: Path) -> None:
    run = make(Slowed, tmp_path / "a", "{a: 1, b: 1}")
    run.go(80)
    first = next(step for step, source in run.begun if source == "b" and step >= 30)
    last = max(step for step, source in run.begun if source == "b" and step < 60)
    assert max(run.loaders[15:first]) == 1
    assert max(run.loaders[first : first + 6]) > 1
    assert run.loaders[last + 5] == 1 == max(run.loaders[65:])
    # What was done is noted, and the documents are those of a run with all loaders all the time.
    events = read_events(run.folder)
    assert {event["source"] for event in events if first <= event["step"] < 60 and event["after"] > 1} == {"b"}
    assert all(run.loaders[event["step"]] == event["after"] != event["before"] for event in events)
    other = make(Slowed, tmp_path / "b", "{a: 1, b: 1}", scaled=False)
    other.go(80)
    assert {*other.loaders} == {LOADERS} and read_events(other.folder) == []
    assert all(map(same, run.tables, other.tables))


def test_a_weight_that_rises_has_its_loaders_before(tmp_path: Path) -> None:
    mix = "[{weights: {a: 95, b: 5}}, {step: 40, weights: {a: 20, b: 80}}, {step: 60, weights: {a: 95, b: 5}}]"
    run = make(Rising, tmp_path, mix)
    run.go(75)
    assert max(run.loaders[36:45]) > 1
    assert max(run.stalls[40:60]) <= 0.2
    assert run.loaders[65] == 1
