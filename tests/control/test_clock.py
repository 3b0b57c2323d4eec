from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.control.clock import AwakeClock


@given(st.lists(st.floats(0, 1000), max_size=20))
def test_the_time_in_which_the_process_was_stopped_does_not_count(pauses: list[float]) -> None:
    """Each pause counts as at most two seconds; between readings of a process that runs, all time counts."""
    now = 100.0
    clock = AwakeClock(lambda: now)
    expected = 0.0
    for pause in pauses:
        now += pause
        expected += min(pause, 2.0)
        assert clock() == pytest.approx(expected)
