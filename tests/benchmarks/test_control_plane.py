"""What a rank holds and sends does not grow with the world. `benchmarks/control_plane.py` has larger ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.control_plane import Costs, collective_s, real, simulated
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


def test_descriptors_and_threads_of_real_processes_are_constant_in_the_world() -> None:
    one, two = (real(agents, ranks=2)[0] for agents in (1, 2))
    assert replace(one, agent_descriptors=0, agent_threads=0) == replace(two, agent_descriptors=0, agent_threads=0)
    assert two.agent_descriptors <= one.agent_descriptors + 2, "its parent or its child"


def test_a_collective_takes_as_long_as_its_levels() -> None:
    """One message takes a second here, and all else nothing: each agent takes those of its members one by one."""
    costs = Costs(take_s=1.0, send_s=0.0, look_s=0.0)
    assert collective_s(1, costs, 0.0, ranks=4) == 4
    assert collective_s(2, costs, 0.0, ranks=4) == 4 + 1 + 1, "up, taken by the root; down, taken by the child"
    assert collective_s(2, replace(costs, send_s=0.25), 10.0, ranks=4) == 4.25 + 10 + 1 + 0.25 + 1.25 + 10 + 1 + 1
    times = [collective_s(agents, costs, 0.0) for agents in (1, 2, 17, 18, 273, 274, 2048)]
    assert all(later >= earlier for earlier, later in pairwise(times))
    assert 8 + 2 * (FAN_OUT + 1) < times[-1] <= 8 + 3 * (FAN_OUT + 1), "three levels below the root"
