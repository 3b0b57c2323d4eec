"""A process that a signal has stopped is noticed after some seconds in which the one that watches has run."""

from __future__ import annotations

from engine.control.clock import AwakeClock
from engine.control.processes import STOPPED_S, StopWatch


def test_a_process_counts_as_stopped_after_some_seconds_without_a_break() -> None:
    now = [0.0]
    watch = StopWatch(AwakeClock(lambda: now[0]))

    def noted(stopped: bool, seconds: float) -> bool:
        now[0] += seconds
        return watch.note(stopped)

    assert not any(noted(True, 1) for _ in range(int(STOPPED_S) + 1))
    assert noted(True, 1) and watch.expired
    assert not noted(False, 1) and not watch.expired
    assert not noted(True, 1)
    assert not noted(True, 3600), "this process was stopped itself, so the clock counts two seconds"
    assert noted(True, 2) and watch.expired
