from __future__ import annotations

import time
from itertools import pairwise
from unittest.mock import patch

import pytest

from engine.hardware.timing import Run, Stopwatch, interleaved, timing_of
from tests.hardware.ranks import groups_of_world
from tests.world import run_world

BLOCK_S = 0.02


def _sleeping(seconds: float, calls: list[float]) -> Run:
    def run() -> tuple[float, float]:
        calls.append(seconds)
        time.sleep(seconds)
        return seconds, 2 * seconds

    return run


def _timed() -> dict[str, object]:
    groups = groups_of_world()
    slow = 1 + groups.rank  # the second rank takes twice as long
    calls: list[float] = []
    lengths = [slow * s for s in (0.001, 0.01, 0.3, 0.5)]
    with patch("engine.control.progress.report") as report:
        timings = interleaved([_sleeping(s, calls) for s in lengths], groups, seconds=0.2, too_long_s=0.5)
    watch = Stopwatch(groups.device)
    began = watch.now()
    time.sleep(BLOCK_S)
    return {
        "timings": [(t.forward_s, t.backward_s, t.spread) for t in timings],
        "calls": [calls.count(s) for s in lengths],
        "watched": watch.now() - began,
        "reported": [call.args for call in report.call_args_list],
    }


def test_a_timing_is_the_median_of_each_rank_and_the_mean_over_ranks() -> None:
    first = [(1.0, 2.0), (1.0, 3.0), (1.0, 90.0), (1.0, 1.0), (1.0, 4.0)]  # shortest total 2, median 4
    second = [(1.0, 5.0), (4.0, 2.0), (3.0, 4.0), (2.0, 6.0), (3.0, 3.0)]  # shortest total 6, median 6
    found = timing_of([first, second])
    assert found.total_s == pytest.approx((4 + 6) / 2)
    assert found.forward_s / found.backward_s == pytest.approx((1 + 3) / (3 + 4)), "medians of both passes"
    assert found.spread == pytest.approx(((4 / 2 - 1) + (6 / 6 - 1)) / 2)


@pytest.mark.world
def test_two_ranks_time_the_same_runs_interleaved() -> None:
    first, second = run_world(2, _timed)
    assert first["timings"] == second["timings"], "both ranks have the mean over ranks"
    assert [t[0] for t in first["timings"]] == pytest.approx([0.0015, 0.015, 0.45])
    assert [t[1] for t in first["timings"]] == pytest.approx([0.003, 0.03, 0.9])
    assert [t[2] for t in first["timings"]] == pytest.approx([0, 0, 0], abs=1e-9)
    assert first["calls"] == second["calls"], "otherwise they would deadlock"
    assert first["calls"][0] > first["calls"][2] >= 3, "short runs are repeated more often"
    assert first["calls"][3] == 0, "runs after the first one that is too long are skipped"
    assert first["watched"] >= BLOCK_S
    places = first["reported"]
    assert len(places) >= sum(first["calls"]) - 3, "each run but the second warm-up, or the launcher would see a hang"
    assert all(before != after for before, after in pairwise(places))
