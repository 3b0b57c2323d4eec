"""What tests take, and whether they have the mark that they need. CONTRIBUTING.md has the marks and the tiers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

running: pytest.Item | None = None  # the test that runs in this process; tests/conftest.py sets it


def begins_world() -> None:
    """Fail the test that runs unless it is marked world: `make check` would start its processes."""
    if running is not None and running.get_closest_marker("world") is None:
        pytest.fail(f"{running.nodeid} starts a world of processes: mark it with pytest.mark.world", pytrace=False)


def processor_seconds() -> float:
    """Return the seconds that this process and those of its children that it waited for kept processors busy."""
    return sum(os.times()[:4])


def summary(reports: Iterable[Any], limit_s: float = 1.0) -> list[str]:
    """Return a line with the processor time of each test that takes longer, the longest first, then one of all tests.

    `processor_s` of the reports of a test is the time from its beginning to the end of each phase. Collection, lint and
    types are not in the sum.
    """
    seconds = dict[str, float]()
    for report in reports:
        if hasattr(report, "processor_s"):
            seconds[report.nodeid] = max(report.processor_s, seconds.get(report.nodeid, 0))
    costly = sorted(((taken, name) for name, taken in seconds.items() if taken > limit_s), reverse=True)
    listed = [*costly, (sum(seconds.values()), "all tests, without their collection")]
    return [f"{taken:5.1f} s of processor time: {name}" for taken, name in listed]
