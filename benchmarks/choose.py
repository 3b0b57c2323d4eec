"""Processor time of a step's planning process: choosing its documents, planning, and the whole answer to the ranks.

    python benchmarks/choose.py [SOURCES ...] [--sequences 131072] [--ranks 16384] [--json]

The lengths of all blocks are in memory, so neither files nor packing count. Lengths are lognormal (mu 7.6, sigma 1.5),
170 documents a block of 1 MiB; weights are 1, 2 and 3 in turn. The first step warms up; times are medians of the next
five. Columns: `choose` is `Steps.next`, `upcoming` lists the blocks that are packed ahead, `plan` is `plan_step`, `cut`
makes the cuts of the plan for hosts of 8 ranks, and `step` is all of `StepPlanner.step`, in seconds. Bytes are in parts
of those of the plan's arrays: `cuts` of all hosts together, `whole` of what the first host gets, with all rows.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import driver
from engine.config.load import load
from engine.data.blocks.blocks import BlockId, Lengths, Range, Slice
from engine.data.opening import Sources
from engine.data.parts import LeftOut
from engine.data.runtime.cuts import cuts_of
from engine.data.runtime.planner import StepPlanner, received_step
from engine.data.steps import Cursor
from engine.job import Job
from engine.planner.make import plan_step
from engine.units import Ints

DRAWN, DOCUMENTS = 256, 170  # blocks, and documents of a block
LONGEST = 1 << 18
STEPS = 5
RANKS = 8  # of a host


class Drawn:
    """Lengths of a block, at random."""

    left_out: LeftOut | None = None

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        self._inputs: Ints = np.clip(random.lognormal(7.6, 1.5, DOCUMENTS), 16, LONGEST).astype(np.int64)
        self._hashes = random.integers(0, 1 << 63, DOCUMENTS, dtype=np.uint64)

    def __len__(self) -> int:
        return DOCUMENTS

    def inputs(self) -> Ints:
        return self._inputs

    def hash(self, first: int = 0, last: int | None = None) -> NDArray[np.uint64]:
        return self._hashes[first:last]

    def runs(self) -> Ints:
        return np.empty((0, 3), dtype=np.int64)


drawn = cache(Drawn)  # so that drawing takes no time


class Corpus:
    """A source of such blocks."""

    vocabulary, kind, ends, fingerprint = 256, "bytes", (None, None), ""
    blocks, share = 100_000, 0.0

    def __init__(self, name: str) -> None:
        self.name = self.place = name

    def size(self, block: int) -> int:
        return 1 << 20

    def files(self, block: int) -> list[str]:
        return [self.name]

    def token_file(self, block: int, document: int) -> tuple[str, int]:
        return self.name, document

    def lengths(self, block: int) -> Lengths:
        return drawn(block % DRAWN)

    def slices(self, wanted: Sequence[Range]) -> list[Slice]:
        raise NotImplementedError("these documents have no tokens")


class NoBlocks:
    """Blocks that nobody packs."""

    def ask(self, wanted: Iterable[BlockId]) -> None:
        for _ in wanted:
            pass

    def lengths(self, block: BlockId) -> Lengths:
        raise NotImplementedError

    def slices(self, wanted: Sequence[Range]) -> list[Slice]:
        raise NotImplementedError

    def keep(self, wanted: Iterable[BlockId]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Has nothing to end."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, default=131_072)
    parser.add_argument("--ranks", type=int, default=16_384)


def cases(arguments: argparse.Namespace) -> Iterator[driver.Case]:
    for sources in (1, 8, 64):
        yield str(sources), partial(rows, sources, arguments.sequences, arguments.ranks)


def rows(sources: int, sequences: int, ranks: int) -> Iterator[driver.Row]:
    names = [f"s{number:02}" for number in range(sources)]
    weights = ", ".join(f"{name}: {1 + number % 3}" for number, name in enumerate(names))
    mean = np.concatenate([drawn(seed).inputs() for seed in range(DRAWN)]).mean()
    config = load(
        [
            "recipe=llama7b-256k",
            "data=jsonl",
            "lengths=data",
            "data.validation_share=0",
            f"context={LONGEST}",
            f"cluster.nodes={-(-ranks // RANKS)}",
            f"cluster.ranks_per_node={RANKS}",
            *("parallel.tp=1", "parallel.pp=1"),
            f"batch_tokens={int(sequences * mean)}",
            f"data.mix={{{weights}}}",
            *(f"data.sources.{name}.path={name}" for name in names),
        ]
    )
    planner = StepPlanner(Sources([Corpus(name) for name in names], NoBlocks()), Job(config))
    cursor, times, length = Cursor(), list[list[float]](), 0
    for _ in range(STEPS + 1):
        whole, sent = seconds(planner.step, cursor)
        table, cursor = received_step(sent).table, sent.after
        length = len(table)
        # The parts are those of the next step, whose windows have not been loaded yet.
        upcoming, _ = seconds(lambda at: list(planner.steps.windows_ahead(at)), cursor)
        choose, found = seconds(planner.steps.next, cursor)
        plan, planned = seconds(plan_step, found[0].length, planner.settings)
        hosts = np.arange(planner.settings.ranks).reshape(-1, RANKS).tolist()
        cut, cuts = seconds(cuts_of, found[0], planned, hosts)
        size = len(planned.to_bytes())
        times.append([choose, upcoming, plan, cut, whole, sum(map(len, cuts)) / size, len(sent.sequences) / size])
        cursor = found[1]
    columns = ["choose", "upcoming", "plan", "cut", "step", "cuts", "whole"]
    yield {
        "sources": sources,
        "ranks": planner.settings.ranks,
        "sequences": length,
        **dict(zip(columns, np.median(times[1:], axis=0).tolist(), strict=True)),
    }


def seconds(work: Callable[..., Any], *given: Any) -> tuple[float, Any]:
    """Do some work; return its processor seconds and its result."""
    began = time.process_time()
    found = work(*given)
    return time.process_time() - began, found


if __name__ == "__main__":
    sys.exit(driver.main(__doc__, cases, options))
