"""Durations of gangs against a slow simulator in plain Python that walks through the schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from engine.cost.times import together
from engine.planner.plan.emit import emit
from engine.planner.time.durations import gang_times
from tests.planner.samples import LINKED_COSTS, ints, settings
from tests.simulator.reference import Machine, gangs_of
from tests.simulator.worlds import World, worlds

EXACT = 1e-9


@pytest.mark.parametrize("lengths", [[60], [60, 60, 24], [36] * 20])
def test_rings_of_the_same_ranks_take_what_profile_hardware_fits(lengths: list[int]) -> None:
    """Lengths are multiples of twice the degree, so that all shards are equal."""
    ranks, ours = 3, replace(settings(ranks=3), costs=LINKED_COSTS)
    rings = [(sequence, tuple(range(ranks))) for sequence in range(len(lengths))]
    plan = emit("by hand", "free", ranks, 10**6, ints(*lengths), [rings])
    found = gang_times(plan, ours.costs, ours.cluster)
    rates, pairs = ours.costs.rates, sum(length * (length + 1) / 2 for length in lengths)
    expected = rates.micro + together(rates, float(sum(lengths)), pairs, len(lengths), ranks, 1.0)
    # Ranks of a ring have slightly different numbers of pairs.
    assert float(found.forward[0] + found.backward[0]) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_long_rings_take_what_their_calls_take(most: int) -> None:
    """Equal calls are computed once and multiplied: rings of other degrees, and teams, end in the middle of them."""
    ranks = 48
    rates = LINKED_COSTS.rates._replace(rounds_per_call=most, overlap=0.6)
    ours = replace(settings("adaptive", ranks, 10**6), costs=replace(LINKED_COSTS, rates=rates))
    rings = [(0, tuple(range(40))), (1, tuple(range(23))), (2, tuple(range(48))), (3, (5, 6))]
    plan = emit("by hand", "free", ranks, 10**6, ints(4000, 700, 9600, 40), [rings])
    plan = replace(plan, team=ints(1, 1, 4, 1))
    found, machine = gang_times(plan, ours.costs, ours.cluster), Machine(ours)
    (gang,) = gangs_of(plan).values()
    forward, backward = (machine.pass_(gang, direction) for direction in ("forward", "backward"))
    assert found.forward[0] == pytest.approx(forward.seconds, rel=EXACT)
    assert found.backward[0] == pytest.approx(backward.seconds, rel=EXACT)
    assert found.exposed[0] == pytest.approx(forward.exposed + backward.exposed, rel=EXACT)


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
