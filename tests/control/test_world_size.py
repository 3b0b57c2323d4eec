"""What a rank holds and sends does not grow with the world. `benchmarks/control_plane.py` has larger ones."""

from __future__ import annotations

import pytest

from benchmarks.control_plane import simulated
from engine.control.reduction import FAN_OUT

pytestmark = pytest.mark.long


def test_connections_and_bytes_are_constant_in_the_world() -> None:
    """Simulated ranks of real agents, in trees of one, two and three levels."""
    one, several, many = (simulated(agents, ranks=2, workers=2, steps=3) for agents in (1, 5, FAN_OUT + 4))
    for world in (several, many):
        assert (world.rank_sent, world.rank_received) == (one.rank_sent, one.rank_received)
    assert one.rank_sent < 300 and one.rank_received < 300
    assert [one.agent_connections, several.agent_connections, many.agent_connections] == [2, 6, FAN_OUT + 2]
    per_message = one.agent_sent / one.messages
    assert many.agent_sent <= 1.01 * per_message * many.messages
    assert many.messages <= 3 * (FAN_OUT + 2 + 1)
