"""Loaders over the steps of a run, of which a source becomes slow, or a weight rises.

    python benchmarks/scaling.py [CASE ...]

Real loaders pack the blocks, and their number follows the processor time that they have measured. Steps and waits are
on a clock of the benchmark, on which each loader has a core, so that a busy machine changes no figure.
Two sources, blocks of a step's tokens, at least 4 in a window; a block takes .25 steps, a slow one 2.5.

- `slow`: both sources have half of the tokens, and the blocks of one are slow if they are begun in steps 30 to 59
- `rise`: the blocks of one are slow in all steps; it has 5 % of the tokens, and 80 % in steps 40 to 59, as announced

Columns: `begun`, the step in which the first slow block is begun (`rise`: in which the weight rises); `more`, the first
step with more loaders than before; `last`, when the last slow block is packed (`rise`: when the weight falls); `back`,
from which step on there are no more than before; `stall`, the longest wait of a step but the first, in steps; `equal`,
whether the sequences of all steps are those of a run without loaders.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from functools import partial
from itertools import groupby
from math import ceil
from pathlib import Path
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from engine.config.load import load
from engine.config.schema import Config
from engine.data import order
from engine.data.blocks.blocks import BlockId
from engine.data.blocks.known import KnownLengths
from engine.data.blocks.loaders import Loaders
from engine.data.blocks.local_blocks import LocalBlocks
from engine.data.blocks.texts import Texts
from engine.data.blocks.work import Cost, joined_costs
from engine.data.opening import open_sources
from engine.data.runtime.scaler import Scaler
from engine.data.runtime.watching import loaders_of, plane_events
from engine.data.sequences import SequenceTable
from engine.data.sources.source import Block, Document
from engine.data.steps import Cursor, Steps
from engine.run.folder import RunFolder

STEP_S = 0.1
FAST_S, SLOW_S = 0.25 * STEP_S, 2.5 * STEP_S
TOKENS = 1000  # of a block, and of a step
LOADERS, STEPS = 6, 80
SLOWED, RISEN = range(30, 60), range(40, 60)  # steps
EVEN = "{a: 1, b: 1}"
RISE = "[{weights: {a: 95, b: 5}}, {step: 40, weights: {a: 20, b: 80}}, {step: 60, weights: {a: 95, b: 5}}]"


@dataclass(frozen=True)
class Metered(Block):
    """Documents that a loader gets when `let` says how much processor time they need."""

    path: Path

    @property
    def files(self) -> list[str]:
        return [str(self.path)]

    @property
    def size(self) -> int:
        return TOKENS

    def let(self, seconds: float) -> None:
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


class Clocked(LocalBlocks):
    """The blocks of a host, whose loaders need `seconds(source, step)` of the clock `now` for a block."""

    def __init__(self, texts: Mapping[str, Texts], pool: Loaders, seconds: Callable[[str, int], float]) -> None:
        super().__init__(texts, pool)
        self._pool, self._seconds, self.now = pool, seconds, 0.0
        self._begun = dict[BlockId, tuple[float, float]]()  # begin and end of blocks that are being packed
        self._packed_costs = dict[str, Cost]()
        self.slow = list[tuple[float, float]]()  # begin and end of slow blocks

    def lengths(self, block: BlockId) -> KnownLengths:
        if not self.is_packed(block) and block not in self._begun:
            self._pool.add(self._work(block))
        while not self.is_packed(block):
            self.advance(min(end for _, end in self._begun.values()) if self._begun else self.now)
        return super().lengths(block)

    def advance(self, now: float) -> None:
        """Let time pass. Loaders that are too many begin no other block."""
        self._begin()
        while self._begun and (first := min(self._begun.items(), key=lambda item: item[1][1]))[1][1] <= now:
            block, (begin, self.now) = first
            work = self._work(block)
            assert isinstance(work.block, Metered)
            work.block.let(self.now - begin)
            self._pool.wait(work.part())
            while not (costs := self._pool.packed()):
                time.sleep(0.001)
            self._packed_costs = joined_costs(self._packed_costs, costs)
            del self._begun[block]
            self._begin()
        self.now = now

    def _begin(self) -> None:
        """Begin blocks in the order in which the pool does."""
        for work in self._pool.missing():
            block = BlockId(work.source, work.number)
            if len(self._begun) < self.loaders and block not in self._begun and not self.is_packed(block):
                seconds = self._seconds(block.source, int(self.now / STEP_S))
                self._begun[block] = self.now, self.now + seconds
                if seconds == SLOW_S:
                    self.slow.append(self._begun[block])

    def missing(self) -> set[BlockId]:
        return {block for block in super().missing() if not self.is_packed(block)}

    def running(self) -> list[tuple[str, float]]:
        return [(block.source, self.now - begin) for block, (begin, _) in self._begun.items()]

    def packed(self) -> dict[str, Cost]:
        costs, self._packed_costs = self._packed_costs, {}
        return costs


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    yield "slow", partial(rows, "slow", EVEN, lambda source, step: source == "b" and step in SLOWED)
    yield "rise", partial(rows, "rise", RISE, lambda source, step: source == "b")


def rows(case: str, mix: str, is_slow: Callable[[str, int], bool]) -> Iterator[driver.Row]:
    # Windows of 4 blocks.
    with tempfile.TemporaryDirectory() as made, patch.object(order, "WINDOW_BYTES", 1):
        folder = RunFolder(Path(made))
        listed = {name: [written(folder.root / f"{name}{number}.txt") for number in range(100)] for name in "ab"}
        config = config_of(folder.root, mix)
        blocks, loaders, waits, tables = run(
            config, folder, listed, lambda source, step: SLOW_S if is_slow(source, step) else FAST_S
        )
        changes = dict(loaders_of(plane_events(folder)))
        steps, cursor = Steps(open_sources(config.data, listed).corpora, config), Cursor()
        equal = True
        for table in tables:
            found = steps.next(cursor)
            assert found is not None
            expected, cursor = found
            equal &= all(np.array_equal(getattr(table, one.name), getattr(expected, one.name)) for one in fields(table))
    slowed = case == "slow"
    begun = int(blocks.slow[0][0] / STEP_S) if slowed else RISEN[0]
    last = ceil(blocks.slow[-1][1] / STEP_S) if slowed else RISEN[-1] + 1
    before = max(loaders[15:25])
    more = next(step for step in range(25, STEPS) if loaders[step] > before)
    back = next(step for step in range(STEPS, 0, -1) if loaders[step - 1] > before)
    stall = max(waits[1:]) / STEP_S
    yield {
        "case": case,
        "begun": begun,
        "more": more,
        "last": last,
        "back": back,
        "most": max(loaders[25:]),
        "stall": stall,
        "equal": equal,
        "loaders": " ".join(f"{count}x{len([*some])}" for count, some in groupby(loaders)),
        "events": len(changes),
        "holds": equal and more <= begun + 5 and back <= last + 5 and stall <= 0.2,
    }


def run(
    config: Config, folder: RunFolder, listed: Mapping[str, list[Block]], seconds: Callable[[str, int], float]
) -> tuple[Clocked, list[int], list[float], list[SequenceTable]]:
    """Return the blocks, and of each step the loaders, the wait in seconds, and the sequences."""
    made, loaders, waits, tables = list[Clocked](), list[int](), list[float](), list[SequenceTable]()

    def make_blocks(texts: Mapping[str, Texts]) -> Clocked:
        made.append(Clocked(texts, Loaders(LOADERS, 1 << 40), seconds))
        return made[0]

    steps, cursor = Steps(open_sources(config.data, listed, make_blocks=make_blocks).corpora, config), Cursor()
    with closing(made[0]) as blocks:
        scaler = Scaler(blocks, 1, LOADERS, folder, 0, lambda: blocks.now)
        for _ in range(STEPS):
            began, windows = blocks.now, list(steps.windows_ahead(cursor))
            blocks.ask(block for window in windows for block in window.blocks)
            scaler.step(steps, cursor, windows)
            loaders.append(blocks.loaders)
            found = steps.next(cursor)
            assert found is not None
            table, cursor = found
            tables.append(table)
            waits.append(blocks.now - began)
            blocks.advance(blocks.now + STEP_S)
            scaler.packed(blocks.packed())
    return blocks, loaders, waits, tables


def written(path: Path) -> Block:
    """Write the documents of a block, of together TOKENS inputs."""
    path.write_text("\n".join(f"{path.stem} {line}".ljust(48, ".") for line in range(20)))
    return Metered(path)


def config_of(folder: Path, mix: str) -> Config:
    sources = [f"data.sources.{name}.path={folder}/{name}*.txt" for name in "ab"]
    sizes = ["context=64", "capacity=64", f"batch_tokens={TOKENS}", "data.validation_share=0"]
    return load(["recipe=quickstart", *sources, *sizes, f"data.cache={folder / 'cache'}", f"data.mix={mix}"])


if __name__ == "__main__":
    sys.exit(driver.main(__doc__, cases))
