from __future__ import annotations

from dataclasses import replace

import pytest

from engine.hardware.measured import Case, Timing
from engine.hardware.predict import seconds
from engine.hardware.ring_fit import fit_rings, link
from tests.hardware.machines import TRUE, config

CASES = [Case(2, shared=(32 << doubling,)) for doubling in range(10)]


@pytest.mark.parametrize(
    ("round_s", "merge", "overlap", "latency_s", "link_rate"),
    [
        (7e-4, 2e9, 0.4, 1e-4, 2e9),
        (1e-5, 1e9, 1.0, 1e-3, 1e8),  # bound by the link
        (1e-4, 5e8, 0.0, 1e-5, 1e9),
    ],
)
def test_rings_of_a_known_machine(
    round_s: float, merge: float, overlap: float, latency_s: float, link_rate: float
) -> None:
    link = {"latency_s": latency_s, "node_bytes_per_s": link_rate}
    true = replace(TRUE, round_s=round_s, merge_bytes_per_s=merge, overlap=overlap, **link)
    timed = [(case, Timing(0.0, seconds(case, true, config()), 0.0)) for case in CASES]
    found = fit_rings(timed, replace(true, round_s=0.5, merge_bytes_per_s=1.0), config())
    assert (found.round_s, found.merge_bytes_per_s) == pytest.approx((round_s, merge), rel=1e-2)
    predicted = [seconds(case, found, config()) for case in CASES]
    assert predicted == pytest.approx([timing.total_s for _, timing in timed], rel=1e-3)


def test_rings_that_cost_less_than_their_compute_cost_nothing_more() -> None:
    timed = [(case, Timing(0.0, 1e-5, 0.0)) for case in CASES]
    found = fit_rings(timed, TRUE, config())
    assert found.round_s == 0
    assert found.merge_bytes_per_s > 1e12


def test_messages_give_latency_and_rate() -> None:
    sizes = (4096, 65536, 1 << 22)
    latency, rate = link([(size, 2e-4 + size / 1.5e9) for size in sizes])
    assert (latency, rate) == pytest.approx((2e-4, 1.5e9))


def test_messages_that_take_the_same_time_have_a_latency_alone() -> None:
    latency, rate = link([(4096, 1e-3), (8192, 1e-3)])
    assert latency == pytest.approx(1e-3)
    assert rate > 1e12
