"""Runs that others published fit, and not by a wide margin: neither too bold nor too timid."""

from __future__ import annotations

import pytest

from benchmarks import estimate_memory
from benchmarks.estimate_memory import RUNS, Published, predicted
from tests.benchmarks.rows import measured


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run.name))
def test_a_published_run_fits_and_not_much_more_does(run: Published) -> None:
    found, longest = predicted(run)
    assert found.fits
    assert 1.0 <= longest / run.context <= 1.6


def test_the_peak_on_an_h200_is_what_its_authors_saw() -> None:
    """Their recipe notes 136.15 GB at 1.2M tokens, which may be GB or GiB: 126.8 or 136.15 GiB."""
    found, _ = predicted(RUNS[0])
    assert 0.95 * 126.8 <= found.peak / 2**30 <= 1.05 * 136.15


def test_it_has_a_row_a_run() -> None:
    assert [row["run"] for row in measured(estimate_memory)["rows"]] == [run.name for run in RUNS]
