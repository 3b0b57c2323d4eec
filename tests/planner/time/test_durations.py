"""Durations of gangs against a slow simulator in plain Python that walks through the schedule."""

from __future__ import annotations

import pytest
from hypothesis import given

from engine.planner.time.durations import gang_times
from tests.simulator.reference import Machine, gangs_of
from tests.simulator.worlds import World, worlds

EXACT = 1e-9


@given(worlds)
def test_each_pass_of_each_gang_takes_what_its_rounds_take(world: World) -> None:
    plan, settings = world
    found, machine = gang_times(plan, settings.costs, settings.cluster), Machine(settings)
    for number, gang in gangs_of(plan).items():
        forward, backward = (machine.pass_(gang, direction) for direction in ("forward", "backward"))
        assert found.forward[number] == pytest.approx(forward.seconds, rel=EXACT)
        assert found.backward[number] == pytest.approx(backward.seconds, rel=EXACT)
        assert found.exposed[number] == pytest.approx(forward.exposed + backward.exposed, rel=EXACT, abs=1e-6)
        for micro in gang:
            both = forward.compute[micro.rank] + backward.compute[micro.rank]
            assert found.compute[micro.index] == pytest.approx(both, rel=EXACT)
