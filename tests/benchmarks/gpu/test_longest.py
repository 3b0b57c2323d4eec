"""The longest context is one that the planner accepts, and a step at it takes at most MOST_S."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import longest
from benchmarks.gpu.longest import MODES, MOST_S, Longest, length_of, step_seconds
from engine.fit.estimate import estimate
from engine.job import Job
from tests.benchmarks.gpu.one_rank import alone
from tests.world import run_world

pytestmark = pytest.mark.long


def test_what_runs_is_the_longest_that_fits_in_memory_and_time() -> None:
    for case in (Longest(mode, ratio) for mode in MODES for ratio in ("0", "auto")):
        found = length_of(case)
        fits, longer = (estimate(Job(case.config(tokens))).fits for tokens in (found.fits, found.fits + 64))
        assert fits and not longer, case
        assert found.runs == found.fits or MOST_S * 0.99 < found.runs_s <= MOST_S < found.fits_s


def tiny() -> dict[str, Any]:
    keys = ("model=tiny", "model.layers=6", "cluster.device_memory=1031MiB")  # of which the runtime has 1 GiB
    case = Longest("none", "auto", keys)
    costs = Job(case.config()).settings.costs
    longest.MOST_S = (step_seconds(costs, 1) + length_of(case).fits_s) / 2
    return longest.longest(case, alone())


@pytest.mark.world
def test_a_tiny_one_is_cut_to_the_time() -> None:
    (found,) = run_world(1, tiny)
    length = found["length"]
    assert found["seconds"] > 0 and found["peak"] > 0
    assert found["holds"] == (found["peak"] <= 1.05 * found["estimate"]), "on a CPU it is the whole process's"
    assert length["runs"] < length["fits"] and "cut" in found["said"]
