"""Runs that others published fit, and not by a wide margin: neither too bold nor too timid."""

from __future__ import annotations

import pytest

from benchmarks import driver, estimate_memory
from benchmarks.estimate_memory import RUNS, Published, predicted
from tests.benchmarks.rows import measured

pytestmark = pytest.mark.long


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


@pytest.mark.parametrize("page", ["docs/memory.md", "benchmarks/RESULTS.md"])
def test_the_tables_in_the_documentation_are_what_it_prints(page: str) -> None:
    lines = (driver.ROOT / page).read_text().splitlines()
    for row in measured(estimate_memory)["rows"]:
        (found,) = [line for line in lines if line.startswith(f"| {row['run']} | {row['published_context']:,} |")]
        figures = (f"{row['peak_gib']}", f"{row['host_per_rank_gib']} GiB", f"{row['longest_context']:,}")
        assert all(f"| {figure} " in found for figure in figures), row
