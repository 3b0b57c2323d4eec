"""The longest context is one that the planner accepts, and a step at it takes at most MOST_S."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.gpu import longest
from benchmarks.gpu.longest import CASES, MODES, MOST_S, Longest, length_of, outlook, step_seconds
from engine.fit.estimate import estimate
from engine.job import Job
from tests.benchmarks.gpu.one_rank import alone
from tests.world import run_world

pytestmark = pytest.mark.long

ALL = [Longest(mode, ratio) for mode in MODES for ratio in ("0", "auto")]


@pytest.mark.parametrize("case", ALL, ids=str)
def test_what_runs_is_the_longest_that_fits_in_memory_and_time(case: Longest) -> None:
    found = length_of(case)
    config = case.config(found.fits)
    assert estimate(Job(config)).fits
    longer = case.config(found.fits + 64)
    assert not estimate(Job(longer)).fits
    assert found.runs == found.fits or MOST_S * 0.99 < found.runs_s <= MOST_S < found.fits_s


def test_offload_makes_the_context_longer_and_none_of_the_cases_is_cut_below_what_fits_without() -> None:
    for mode in MODES:
        without, with_ = (length_of(Longest(mode, ratio)) for ratio in ("0", "auto"))
        assert with_.fits > 1.4 * without.fits
        assert Longest(mode, "auto") not in CASES or with_.runs > without.fits


def test_the_outlook_names_every_mode_and_what_is_not_run() -> None:
    said = outlook()
    assert [str(case) in text for case, text in zip(ALL, said, strict=True)] == [True] * len(ALL)
    assert [text.endswith("not run") for text in said] == [case not in CASES for case in ALL]


def tiny(ratio: str, cut: bool) -> dict[str, Any]:
    keys = ("model=tiny", "model.layers=6", "cluster.device_memory=1031MiB")  # of which the runtime has 1 GiB
    case = Longest("none", ratio, keys)
    if cut:
        costs = Job(case.config()).settings.costs
        longest.MOST_S = (step_seconds(costs, 1) + length_of(case).fits_s) / 2
    return longest.longest(case, alone())


@pytest.mark.world
@pytest.mark.parametrize(("ratio", "cut"), [("auto", False), ("auto", True), ("0", False)])
def test_a_tiny_one_runs_whole_or_cut(ratio: str, cut: bool) -> None:
    (found,) = run_world(1, tiny, ratio, cut)
    length = found["length"]
    assert found["seconds"] > 0 and found["peak"] > 0
    assert found["holds"] == (found["peak"] <= 1.05 * found["estimate"]), "on a CPU it is the whole process's"
    assert (length["runs"] < length["fits"]) == cut == ("cut" in found["said"])
    assert found["ratio"] == 0 if ratio == "0" else found["ratio"] > 0.5 or cut
