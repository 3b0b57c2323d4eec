"""Runs that others published fit, and not by a wide margin: neither too bold nor too timid."""

from __future__ import annotations

import pytest

from benchmarks import driver, estimate_memory
from tests.benchmarks.rows import measured

pytestmark = pytest.mark.long


@pytest.mark.parametrize("page", ["docs/memory.md", "benchmarks/RESULTS.md"])
def test_the_tables_in_the_documentation_are_what_it_prints(page: str) -> None:
    lines = (driver.ROOT / page).read_text().splitlines()
    for row in measured(estimate_memory)["rows"]:
        (found,) = [line for line in lines if line.startswith(f"| {row['run']} | {row['published_context']:,} |")]
        figures = (f"{row['peak_gib']}", f"{row['host_per_rank_gib']} GiB", f"{row['longest_context']:,}")
        assert all(f"| {figure} " in found for figure in figures), row
