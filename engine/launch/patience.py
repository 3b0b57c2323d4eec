"""Decides that ranks hang: none of them has begun another part of its step for much longer than a step takes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from engine.control.progress import PHASES

_TIMES = 10  # the longest step
_LEAST_S = 6.0
_FEWEST, _REMEMBERED = 2, 50  # steps
_STARTING_S = 1800.0  # until some steps are done: kernels are compiled, and communicators made
_WAITING_S = {"plan": 600.0, "save": 1800.0}  # for storage

Place = tuple[int, str, int]  # step, phase, and part of the phase


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
        self._moved = now()  # when a rank last began another part
        self._begun: list[tuple[int, float]] = []  # steps, and when the first rank began them
        self._count = 0
        self._steps = deque[float](maxlen=_REMEMBERED)  # seconds of each

    def note(self, rank: int, place: Place, since: float) -> None:
        """Note that a rank is at a place since a time of the clock."""
        if place == self._places.get(rank):
            return
        self._places[rank] = place
        self._moved = max(self._moved, since)
        if not self._begun or place[0] > self._begun[-1][0]:
            self._begun = [*self._begun[-1:], (place[0], since)]
            self._count += 1
            if self._count > 2:  # in the first step, kernels are compiled
                self._steps.append(since - self._begun[0][1])

    def hang(self) -> Hang | None:
        """Return the hang, if ranks that have reported their places do not get on any more."""
        silent = self._now() - self._moved
        if not self._places or silent < self.limit():
            return None
        behind = min(self._places, key=self._order)
        others = sorted({self.where(rank) for rank in self._places if self._places[rank] != self._places[behind]})
        rest = f"; others are in {', '.join(others[:3])}" if others else ", as are all others"
        longest = f" (the longest of the last steps took {max(self._steps):.1f} s)" if self._steps else ""
        where = self.where(behind)
        return Hang(behind, f"no rank has got on for {silent:.0f} s{longest}: rank {behind} is in {where}{rest}")

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
        micro = f", micro-batch {part}" if phase in ("forward", "backward", "validate") else ""
        return f"step {step} ({phase}{micro})"

    def _order(self, rank: int) -> tuple[int, int, int]:
        """Sort key: the rank that is furthest behind comes first."""
        step, phase, part = self._places[rank]
        return step, PHASES.index(phase), part
