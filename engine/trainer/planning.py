"""Plans off the training path: step k + 1 is planned in a process of its own while step k runs.

Rank 0 plans and broadcasts over the control group; all ranks compare the bytes' hash, and what they planned for.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from engine.config.schema import Config
from engine.data.index import Index
from engine.data.steps import Cursor, SequenceTable, next_step
from engine.errors import PlanError
from engine.planner.make import PlanSettings, plan_step
from engine.planner.plan import StepPlan


@dataclass(frozen=True)
class Feed:
    """Which documents are in which step: a pure function of the index, the seed and the cursor."""

    index_path: Path
    seed: int
    batch_tokens: int
    context: int

    @classmethod
    def of(cls, config: Config, index_path: Path) -> Feed:
        """Return the feed of a run."""
        return cls(index_path, config.run.seed, config.batch_tokens, config.context)

    def step(self, cursor: Cursor) -> tuple[SequenceTable, Cursor]:
        """Return the sequences of the step at `cursor`, and the cursor after it."""
        return next_step(_index(self.index_path), cursor, self.seed, self.batch_tokens, self.context)


@lru_cache(maxsize=1)
def _index(path: Path) -> Index:
    return Index.load(path)


def _plan(feed: Feed, cursor: Cursor, settings: PlanSettings) -> bytes:
    return plan_step(feed.step(cursor)[0].length, settings).to_bytes()


def _end_with_rank() -> None:
    """Let the planning process end when its rank is gone, however: a killed rank cannot tell it."""

    def watch() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class PlanAhead:
    """Gives the plan of the step at a cursor, and starts on the next one. All ranks call `take` for the same steps."""

    def __init__(self, feed: Feed, settings: PlanSettings, rank: int, control: dist.ProcessGroup) -> None:
        self._feed, self._settings, self._rank, self._control = feed, settings, rank, control
        context = multiprocessing.get_context("spawn")  # a fork would copy threads and communicators
        self._pool = ProcessPoolExecutor(1, context, initializer=_end_with_rank) if rank == 0 else None
        self._pending: Future[bytes] | None = None

    def request(self, cursor: Cursor) -> None:
        """Start planning the step at `cursor`; only rank 0 has work."""
        if self._pool is not None:
            self._pending = self._pool.submit(_plan, self._feed, cursor, self._settings)

    def take(self, cursor: Cursor) -> tuple[SequenceTable, Cursor, StepPlan]:
        """Return the step at `cursor`, which was requested before: its sequences, the next cursor, its plan.

        Raises PlanError when a rank would run other sequences than were planned.
        """
        table, after = self._feed.step(cursor)
        plan = StepPlan.from_bytes(_broadcast(self._pending.result() if self._pending else b"", self._control))
        if not np.array_equal(plan.lengths, table.length):
            raise PlanError(0, f"rank {self._rank} reads other documents than rank 0 planned for")
        check_slots(plan, self._settings.mode)
        compare_digests(plan.digest, self._control)
        return table, after, plan

    def close(self) -> None:
        """End the planning process."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def check_slots(plan: StepPlan, mode: str) -> None:
    """Raise PlanError where ranks would wait for each other for ever: DeepSpeed meets in every micro-batch of lockstep
    mode, and in no mode can a rank be without one."""
    counts = np.diff(plan.micro_start)
    if counts.min() < 1:
        raise PlanError(0, f"rank {int(counts.argmin())} has no micro-batch")
    if mode == "lockstep" and counts.min() != counts.max():
        few, many = int(counts.argmin()), int(counts.argmax())
        raise PlanError(5, f"rank {few} has {counts[few]} micro-batches and rank {many} has {counts[many]}")


def compare_digests(digest: str, control: dist.ProcessGroup) -> None:
    """Raise PlanError unless all ranks hold the same bytes."""
    digests: list[str] = [""] * dist.get_world_size(control)
    dist.all_gather_object(digests, digest, group=control)
    if len(set(digests)) > 1:
        odd = next(rank for rank, other in enumerate(digests) if other != digests[0])
        raise PlanError(0, f"rank {odd} holds another plan than rank 0: {digests[odd]} against {digests[0]}")


def _broadcast(buffer: bytes, control: dist.ProcessGroup) -> bytes:
    size = torch.tensor([len(buffer)])
    dist.broadcast(size, 0, group=control)
    data = (
        torch.frombuffer(bytearray(buffer), dtype=torch.uint8) if buffer else torch.empty(int(size), dtype=torch.uint8)
    )
    dist.broadcast(data, 0, group=control)
    return data.numpy().tobytes()
