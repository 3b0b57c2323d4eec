"""Runs that others published fit, and not by a wide margin: neither too bold nor too timid."""

from __future__ import annotations

import pytest

from benchmarks.estimate_memory import RUNS, Published, predicted


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run.name))
def test_a_published_run_fits_and_not_much_more_does(run: Published) -> None:
    found, longest = predicted(run)
    assert found.fits
    assert 1.0 <= longest / run.context <= 1.6
