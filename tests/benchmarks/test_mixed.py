from __future__ import annotations

from benchmarks.mixed import measure, slowed
from benchmarks.traces import settings_of


def test_half_of_the_nodes_are_slowed() -> None:
    cluster = slowed(settings_of("lognormal", 16).cluster)
    assert [node.speed for node in cluster.nodes] == [100, 50]


def test_plans_that_know_the_slow_nodes_beat_plans_that_do_not() -> None:
    aware, blind = measure("lognormal", 16, 64, seed=0)
    assert 1 - 1e-4 <= aware < 1.2 < blind
