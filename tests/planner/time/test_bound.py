"""The lower bound against brute force: every degree of every sequence, and a fine scan of T."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cluster.cluster import Cluster
from engine.cluster.hostfile import Node
from engine.cost.times import Rates, shared
from engine.planner.adaptive.workload import lower_bound
from engine.planner.make import plan_step
from engine.planner.planners import PLANNERS
from engine.planner.time.bound import fastest, least_degree, least_degree_near, ring_time
from engine.simulator.timeline import simulate
from engine.units import PPM
from tests.planner.samples import COSTS, device, ints, settings

LINKS = COSTS.rates._replace(micro=0.0, latency=50.0, kv=0.8, dkv=1.6, inter_node_slowdown=4.0, round=20.0)


def asked(rates: Rates = LINKS, ranks: int = 6, capacity: int = 64):
    return replace(settings("adaptive", ranks, capacity), costs=replace(COSTS, rates=rates))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_bound_is_the_least_feasible_time(step: list[int], windowed: float) -> None:
    ranks, capacity = 6, 64
    rates = LINKS._replace(windowed=windowed, window=40.0)
    times = {s: {d: shared(rates, float(s), d, 1.0) for d in range(-(-s // capacity), ranks + 1)} for s in set(step)}

    def fits(limit: float) -> bool:
        works = [min((d * t for d, t in times[s].items() if t <= limit), default=np.inf) for s in step]
        return sum(works) <= ranks * limit

    found = lower_bound(ints(*step), asked(rates))
    assert fits(found * 1.0001) and not fits(found * 0.9997)


@pytest.mark.parametrize("planner", sorted(PLANNERS))
@given(data=st.data())
def test_no_planner_is_below_the_bound(planner: str, data: st.DataObject) -> None:
    """Also with nodes of any speed and memory, and with offload at almost no cost; all shards are equal."""
    step = 120 * ints(*data.draw(st.lists(st.integers(1, 17), min_size=1, max_size=30)))
    kinds = st.tuples(st.sampled_from([100, 90, 50]), st.sampled_from([None, device(360), 2**21]))
    others = (Node(f"host-{at}", 2, *data.draw(kinds)) for at in range(2))
    nodes = (Node("usual", 2, data.draw(st.sampled_from([100, 90, 50]))), *others)
    micro = data.draw(st.sampled_from([50_000.0, 500_000.0]))
    rates = LINKS._replace(micro=micro, copy=1.0, rounds_per_call=data.draw(st.sampled_from([1, 4])))
    rates = rates._replace(round=data.draw(st.sampled_from([20.0, 20_000.0])))
    rates = rates._replace(
        window=float(data.draw(st.integers(1, 2000))), windowed=data.draw(st.sampled_from([0.0, 0.5]))
    )
    plain = asked(rates, capacity=720).by(planner)
    offload = data.draw(st.sampled_from([0, PPM]))
    ours = replace(plain, cluster=Cluster(nodes, 2**20), offload=offload, host_memory=2**40)
    assert simulate(plan_step(step, ours), ours).makespan >= (1 - 1e-4) * lower_bound(step, ours)


def test_the_bound_of_a_ring_whose_fixed_time_and_transfers_are_large() -> None:
    """The first round has no fixed time, so the transfers of later rounds hide behind theirs and not behind a mean."""
    backward = 2.0 * (100 * 101 / 2) / 4  # compute of a round
    rates = LINKS._replace(micro=0.0, latency=0.0, token_f=0.0, token_b=0.0, pair_b=2.0, overlap=1.0, round=2000.0)
    rates = rates._replace(kv=0.5 * backward / 50, dkv=(backward + 2500) / 50, sequence=0.0, ring=0.0, merge=0.0)
    ours = asked(rates, ranks=2)
    assert simulate(plan_step(ints(100), ours), ours).makespan >= (1 - 1e-9) * lower_bound(ints(100), ours)


@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 40), st.integers(1, 12), st.floats(1e2, 1e6))
def test_the_least_degree_is_the_first_within_the_limit(
    tokens: int, floor: int, most: int, node: int, limit: float
) -> None:
    """By bisection, against a search of every degree; whatever degree is tried first."""
    most = max(floor, most)
    keeps = [d for d in range(floor, most + 1) if ring_time(LINKS, float(tokens), d, node, 0.0) <= limit]
    expected = keeps[0] if keeps else 0
    assert least_degree(LINKS, float(tokens), floor, most, node, 0.0, limit) == expected
    for near in range(most + 2):
        assert least_degree_near(LINKS, float(tokens), floor, most, node, 0.0, limit, near) == expected


@given(st.integers(1, 4000), st.integers(2, 60))
def test_the_fastest_degree_is_the_fastest(tokens: int, most: int) -> None:
    times = [ring_time(LINKS, float(tokens), d, 100, 0.0) for d in range(2, most + 1)]
    assert times[fastest(LINKS, float(tokens), 2, most, 100, 0.0) - 2] == min(times)
