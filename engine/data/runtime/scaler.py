"""Sets the number of loaders at each step, by what is announced, what is packed, and what blocks cost (scaling.py)."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from statistics import median
from typing import Protocol

from engine.config import schema
from engine.data.blocks.blocks import BlockId
from engine.data.blocks.work import Cost, joined_costs
from engine.data.runtime.events import EventLog
from engine.data.runtime.scaling import Estimates, Need, SourceState, loaders_wanted, needs
from engine.data.steps import Cursor, Steps, WindowAhead
from engine.data.workers import cores
from engine.run.folder import RunFolder

_LAST_STEPS = 5  # whose median is the time of a step: one that has waited does not change it
_MOST = 8  # loaders of a host, if data.loaders is not set
_UNKNOWN_S = 0.001  # before the second step: all that can be packed is needed now


def loader_bounds(data: schema.Data, hosts: int = 1) -> tuple[int, int]:
    """Return the least and the most loaders of some hosts together; `data.loaders` sets their number."""
    most = data.loaders or min(_MOST, max(1, cores() // 2))
    return hosts * (data.loaders or 1), hosts * most


class Pool(Protocol):
    """Loaders."""

    @property
    def loaders(self) -> int:
        """How many there should be."""
        ...

    def resize(self, loaders: int) -> None:
        """Set how many there should be. One that is too many ends when it has packed its block."""
        ...

    def missing(self) -> set[BlockId]:
        """Return the blocks that were asked for and are not packed."""
        ...

    def running(self) -> list[tuple[str, float]]:
        """Return the source of each block that is being packed, and processor seconds that it has taken so far."""
        ...


class Scaler:
    """Call `step` after the blocks of a step were asked for, `packed` with the costs of blocks that were packed."""

    def __init__(
        self,
        pool: Pool,
        least: int,
        most: int,
        folder: RunFolder,
        host: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The pool gets `least` to `most` loaders. Changes are noted in a run folder, as those of a host, or of all."""
        self._pool, self._least, self._most = pool, least, most
        self._folder, self._host, self._clock = folder, host, clock
        self._estimates, self._costs = Estimates(), dict[str, Cost]()
        self._begun, self._steps_s = 0.0, deque[float](maxlen=_LAST_STEPS)
        self._planned: Cursor | None = None

    def packed(self, costs: Mapping[str, Cost]) -> None:
        """Note what blocks have cost, by source."""
        self._costs = joined_costs(self._costs, costs)
        for name, cost in costs.items():
            for _ in range(cost.blocks):
                self._estimates.packed(name, cost.seconds / cost.blocks)

    def step(self, steps: Steps, cursor: Cursor, windows: Iterable[WindowAhead]) -> None:
        """Set the number of loaders for the step at a cursor, which is planned now. `windows` were asked for."""
        now = self._clock()
        if self._planned is not None and cursor.step == self._planned.step + 1:
            self._steps_s.append(now - self._begun)
            self._estimates.step()
        self._planned, self._begun = cursor, now
        missing = self._pool.missing()
        needed = needs(steps.weights_ahead(cursor), steps.batch_tokens, self._states(windows, missing))
        seconds = self._estimates.seconds(self._pool.running())
        step_s = median(self._steps_s) if self._steps_s else _UNKNOWN_S
        # What is asked for may be less than what is needed, for example at the end of a source.
        most = max(self._least, min(self._most, len(missing)))
        wanted = loaders_wanted(needed, seconds, step_s, most, self._least)
        before = self._pool.loaders
        self._pool.resize(wanted)  # in each step, because a host of the pool may have been replaced
        if wanted != before:
            self._note(cursor.step, before, wanted, _source_of(needed, seconds))

    def _states(self, windows: Iterable[WindowAhead], missing: set[BlockId]) -> dict[str, SourceState]:
        """Return how far each source is packed: all windows before the first that misses a block, and what it has."""
        found, complete = dict[str, SourceState](), set[str]()
        for window in windows:
            name, count = window.blocks[0].source, len(window.blocks)
            state = found.get(name, SourceState(0.0, count, 1.0))
            if name in found and name not in complete:
                continue
            cost = self._costs.get(name)
            tokens = cost.tokens / cost.blocks if cost is not None and cost.blocks else window.tokens / count
            packed = sum(block not in missing for block in window.blocks)
            if packed == count:
                complete.add(name)
                found[name] = SourceState(state.left + (1 - window.used) * count * tokens, count, tokens)
            else:
                complete.discard(name)
                found[name] = SourceState(state.left, count, tokens, packed)
        return found

    def _note(self, step: int, before: int, after: int, source: str | None) -> None:
        """Note a change. A run does not end because that cannot be written."""
        try:
            with closing(EventLog(self._folder)) as log:
                log.scaled(step, self._host, before, after, source)
        except OSError as error:
            logging.getLogger(__name__).warning("events of the data plane cannot be written: %s", error)


def _source_of(needed: list[Need], seconds: Mapping[str, float]) -> str | None:
    """Return the source with most work."""
    work = dict[str, float]()
    for need in needed:
        work[need.source] = work.get(need.source, 0.0) + need.blocks * seconds.get(need.source, 1.0)
    return max(work, key=lambda name: work[name], default=None)
