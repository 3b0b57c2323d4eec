"""Decides that ranks hang: none of them has begun another part of its step for much longer than a step takes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from engine.control.progress import OF_MICRO_BATCHES, PHASES

_TIMES = 10  # the longest of the last steps
# Kernels may be compiled in any step, for another shape or for validation, and storage may stall.
_LEAST_S = 60.0
_FEWEST, _REMEMBERED = 2, 50  # steps
_STARTING_S = 1800.0  # until some steps are done: weights are read, kernels compiled, and communicators made
_WAITING_S = {"plan": 600.0, "data": 600.0, "validate": 600.0, "save": 1800.0}  # for storage

Place = tuple[int, str, int]  # step, phase, and part of the phase
_START: Place = (0, "start", 0)


class Hang(NamedTuple):
    """The rank that is furthest behind, and what has happened."""

    rank: int
    message: str


class Patience:
    """Knows where each rank is, since when, and how long steps take."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now` gives the time in seconds."""
        self._now = now
        self._places = dict[int, Place]()
        self._reported = False
        self._moved = now()  # when a rank last began another part
        self._begun: tuple[int, float] | None = None  # the last step that a rank has begun, and when
        self._warm = False  # whether the first step, in which kernels are compiled, is over
        self._steps = deque[float](maxlen=_REMEMBERED)  # seconds of each

    def note(self, rank: int, place: Place | None, since: float) -> None:
        """Note that a rank is at a place since a time of the clock; None if it runs, but has not reported anything."""
        if place is None:
            self._places.setdefault(rank, _START)
            return
        self._reported = True
        if place == self._places.get(rank):
            return
        self._places[rank] = place
        self._moved = max(self._moved, since)
        step = place[0]
        if self._begun is None:
            if step:
                self._begun = step, since
        elif step > self._begun[0]:
            last, began = self._begun
            if self._warm:
                self._steps.append(max(0.0, since - began) / (step - last))  # short steps are not all seen
            self._begun, self._warm = (step, since), True

    def forget(self, rank: int) -> None:
        """Note that a rank has ended."""
        self._places.pop(rank, None)

    @property
    def begun(self) -> bool:
        """Whether a rank has begun a step."""
        return self._begun is not None

    def hang(self) -> Hang | None:
        """Return the hang, if ranks do not get on any more. Ranks of which none reports its place cannot be judged."""
        silent = self._now() - self._moved
        if not self._reported or not self._places or silent < self.limit():
            return None
        behind = min(self._places, key=self._order)
        others = sorted({self.where(rank) for rank in self._places if self._places[rank] != self._places[behind]})
        rest = f"; others are in {', '.join(others[:3])}" if others else ""
        if not others and len(self._places) > 1:
            rest = ", as are all others"
        longest = f" (the longest of the last steps took {max(self._steps):.1f} s)" if self._steps else ""
        where = self.where(behind)
        return Hang(behind, f"no rank has made progress for {silent:.0f} s{longest}: rank {behind} is in {where}{rest}")

    def limit(self) -> float:
        """Return for how many seconds no rank may get on."""
        if len(self._steps) < _FEWEST:
            return _STARTING_S
        waits = [_WAITING_S.get(phase, 0.0) for _, phase, _ in self._places.values()]
        return max(_LEAST_S, _TIMES * max(self._steps), *waits)

    def where(self, rank: int) -> str:
        """Describe the place of a rank, such as `step 3 (forward, micro-batch 2)`; empty if it is not known."""
        if rank not in self._places:
            return ""
        step, phase, part = self._places[rank]
        if not step:
            return "its start"
        micro = f", micro-batch {part}" if phase in (*OF_MICRO_BATCHES, "validate") else ""
        return f"step {step} ({phase}{micro})"

    def _order(self, rank: int) -> tuple[int, int, int, int]:
        """Sort key: the rank that is furthest behind comes first."""
        step, phase, part = self._places[rank]
        # The phases of a micro-batch are repeated, so backward of micro-batch 2 comes before forward of micro-batch 3.
        place = PHASES.index(OF_MICRO_BATCHES[0] if phase in OF_MICRO_BATCHES else phase)
        return step, place, part, PHASES.index(phase)
