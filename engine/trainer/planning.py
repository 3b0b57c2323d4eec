"""Plans in the background: a separate process plans step k + 1 while step k runs.

Every rank computes the whole plan. A plan is a pure function of lengths and settings, so ranks do not exchange plans.
They only compare digests (`Control.check_same`), to detect a rank with a different plan. The planning process gets only
lengths: it imports no torch and reads no documents.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass

from engine.data.steps import Cursor, SequenceTable
from engine.planner.make import plan_step
from engine.planner.plan.step_plan import StepPlan
from engine.planner.settings import PlanSettings
from engine.simulator.timeline import balance
from engine.trainer.feed import Feed
from engine.units import Ints


@dataclass(frozen=True)
class Planned:
    """A planned step: its sequences, its plan, the simulated balance of the plan, and the cursor of the next step."""

    table: SequenceTable
    plan: StepPlan
    balance: float
    after: Cursor


class PlanAhead:
    """Plans one step at a time in another process: `request` starts planning, `take` waits for the plan."""

    def __init__(self, feed: Feed, settings: PlanSettings) -> None:
        self._feed, self._settings = feed, settings
        context = multiprocessing.get_context("spawn")  # a fork would copy threads and communicators
        self._pool = ProcessPoolExecutor(1, context, initializer=_end_with_parent)
        self._pending: tuple[SequenceTable, Cursor, Future[tuple[bytes, float]]] | None = None

    def request(self, cursor: Cursor) -> None:
        """Start planning the step at `cursor`."""
        table, after = self._feed.step(cursor)
        self._pending = table, after, self._pool.submit(_plan, table.length, self._settings)

    def take(self) -> Planned:
        """Wait for the requested plan and return it. Raises any error of the planning process."""
        assert self._pending is not None, "request comes first"
        table, after, future = self._pending
        buffer, simulated = future.result()
        plan = StepPlan.from_bytes(buffer)
        return Planned(table, plan, simulated, after)

    def close(self) -> None:
        """End the planning process."""
        self._pool.shutdown(cancel_futures=True)


def _plan(lengths: Ints, settings: PlanSettings) -> tuple[bytes, float]:
    """Plan a step in the planning process; return the plan's bytes and its balance.

    The balance is simulated here too, because that takes as long as planning.
    """
    plan = plan_step(lengths, settings)
    return plan.to_bytes(), balance(plan, settings)


def _end_with_parent() -> None:
    """Make the planning process exit when its rank exits, even if the rank is killed, but not earlier.

    It ignores SIGTERM, which a scheduler may send to all processes of a job: the rank needs plans until it has saved.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
