"""Decides that ranks hang: none of them has begun another part of its step for much longer than the step takes.

How long that is, the plan says, in seconds of the planned hardware. The ratio of measured to planned seconds of earlier
steps turns them into seconds of this hardware.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from engine.control.progress import OF_PASSES, PHASES
from engine.control.protocol import Place

_TIMES = 10  # the longest of the last steps, or of what the plan says of this one
# Kernels may be compiled in any step, for another shape or for validation, and storage may stall.
_LEAST_S = 60.0
_FEWEST, _REMEMBERED = 2, 50  # steps
_STARTING_S = 1800.0  # until some steps are done: weights are read, kernels compiled, and communicators made
_WAITING_S = {"plan": 600.0, "data": 600.0, "validate": 600.0, "save": 1800.0}  # for storage
_COLLECTIVES = ("reduce", "update", "log")  # phases in which the devices of all ranks meet
_NAMED = 5  # ranks in a message

_START: Place = (0, "start", 0)


class Hang(NamedTuple):
    """The rank furthest behind, and the description of the hang."""

    rank: int
    message: str


class Patience:
    """Knows where each rank is, since when, and how long steps take."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now` gives the time in seconds."""
        self._now = now
        self._places = dict[int, Place]()
        self._entered = dict[int, int]()  # collectives of the control plane
        self._planned = dict[int, float]()  # seconds that the plan of the rank's step takes
        self.reported = False  # whether a rank has reported a place
        self._moved = now()  # when a rank last began another part
        self._first: int | None = None  # the first step of which a rank was seen
        self.begun = False  # whether a rank has begun to compute it
        self._last: int | None = None  # the last finished step
        self._steps = deque[tuple[float, float]](maxlen=_REMEMBERED)  # seconds of each: planned, measured

    def note(self, rank: int, place: Place | None, since: float, entered: int = 0) -> None:
        """Note that a rank is at a place since a time of the clock; None if it runs, but has not reported anything.

        `entered` is the number of collectives of the control plane that the rank has entered.
        """
        self._entered[rank] = entered
        if place is None:
            self._places.setdefault(rank, _START)
            return
        self.reported = True
        if place == self._places.get(rank):
            return
        self._places[rank] = place
        self._moved = max(self._moved, since)
        step, phase, _ = place
        if step:
            self._first = step if self._first is None else self._first
            self.begun |= step > self._first or phase != "plan"

    def expect(self, rank: int, planned_s: float | None, measured: tuple[int, float, float] | None) -> None:
        """Note how long the plan of a rank's step takes, and of its last finished step: number, planned, measured."""
        if planned_s is not None:
            self._planned[rank] = planned_s
        if measured is None:
            return
        step, planned, seconds = measured
        # Short steps are not all seen. Kernels are compiled in the first one, so it does not count.
        if self._last is not None and step > self._last:
            self._steps.append((planned, seconds))
        self._last = max(step, self._last or 0)

    @property
    def starting(self) -> bool:
        """Whether ranks report where they are, and none has begun to compute a step: it may wait for its first plan."""
        return self.reported and not self.begun

    def forget(self, rank: int) -> None:
        """Note that a rank has ended."""
        for known in (self._places, self._entered, self._planned):
            known.pop(rank, None)

    def hang(self) -> Hang | None:
        """Return the hang if no rank makes progress; None while no rank has reported its place."""
        silent = self._now() - self._moved
        if not self.reported or not self._places or silent < self.limit():
            return None
        behind = min(self._places, key=self._order)
        others = sorted({self.where(rank) for rank in self._places if self._places[rank] != self._places[behind]})
        rest = f"; others are in {', '.join(others[:3])}" if others else ""
        if not others and len(self._places) > 1:
            rest = ", as are all others"
        longest, expected = self._step_s()
        planned = f", this one should take {expected:.1f} s" if expected > longest else ""
        known = f" (the longest of the last steps took {longest:.1f} s{planned})" if self._steps else ""
        message = f"no rank has made progress for {silent:.0f} s{known}: rank {behind} is in {self.where(behind)}{rest}"
        return Hang(behind, message + self._awaited())

    def limit(self) -> float:
        """Return for how many seconds no rank may make progress."""
        least = _STARTING_S if len(self._steps) < _FEWEST else _LEAST_S
        waits = [_WAITING_S.get(phase, 0.0) for _, phase, _ in self._places.values()]
        return max(least, _TIMES * max(self._step_s()), *waits)

    def _step_s(self) -> tuple[float, float]:
        """Return how long the longest of the last steps took, and how long this one should take."""
        if not self._steps:
            return 0.0, 0.0
        # The median: a step in which storage stalled must not stretch a long one.
        ratio = median(measured / planned for planned, measured in self._steps)
        return max(measured for _, measured in self._steps), ratio * max(self._planned.values(), default=0.0)

    def _awaited(self) -> str:
        """Say which ranks have not entered the collective in which those furthest ahead wait, if it is known."""
        ahead = max(self._places, key=self._order)
        missing = [rank for rank in self._places if self._entered[rank] < self._entered[ahead]]
        phase = self._places[ahead][1]
        if not missing and phase in _COLLECTIVES:  # of the device
            missing = [rank for rank in self._places if self._places[rank] != self._places[ahead]]
        if not missing:
            return ""
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        names = ", ".join(map(str, sorted(missing)[:_NAMED]))
        return f"; the collective of {phase} waits for rank{'s' * (len(missing) > 1)} {names}{more}"

    def where(self, rank: int) -> str:
        """Describe the place of a rank, such as `step 3 (forward, pass 2)`; empty if it is not known."""
        if rank not in self._places:
            return ""
        step, phase, part = self._places[rank]
        if not step:
            return "its start"
        number = f", pass {part}" if phase in (*OF_PASSES, "validate") else ""
        return f"step {step} ({phase}{number})"

    def _order(self, rank: int) -> tuple[int, int, int, int, int]:
        """Sort key: the rank that is furthest behind comes first."""
        step, phase, part = self._places[rank]
        # The phases of passes are repeated, so backward as pass 3 comes before forward as pass 4.
        place = PHASES.index(OF_PASSES[0] if phase in OF_PASSES else phase)
        return step, place, part, PHASES.index(phase), self._entered[rank]
