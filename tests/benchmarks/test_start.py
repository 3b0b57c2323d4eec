from __future__ import annotations

import pytest

from benchmarks import start
from engine.data.order import ORDER
from tests.benchmarks.rows import measured

pytestmark = pytest.mark.long


def test_a_start_packs_at_most_four_times_the_blocks_that_it_needs() -> None:
    """Of 8 sources; benchmarks/RESULTS.md has more."""
    before, after = measured(start, "8/long")["rows"]
    assert (before["order"], after["order"]) == (1, ORDER) and after["holds"]
    assert before["packed"] == 8 * 32 and after["packed"] <= 4 * after["blocks"] < before["packed"] / 2
