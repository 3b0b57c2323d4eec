"""Real loaders are as many as the work ahead needs, and no step waits for them."""

from __future__ import annotations

import pytest

from benchmarks import scaling
from tests.benchmarks.rows import measured

pytestmark = pytest.mark.long


@pytest.mark.parametrize("case", ["slow", "rise"])
def test_loaders_of_a_slow_source_and_of_one_whose_weight_rises(case: str) -> None:
    (row,) = measured(scaling, case)["rows"]
    assert row["equal"] and row["stall"] <= 0.2 and 1 < row["most"] <= scaling.LOADERS
    assert row["more"] <= row["begun"] + (5 if case == "slow" else 0) and row["back"] <= row["last"] + 5
    assert row["loaders"].endswith(f" 1x{scaling.STEPS - row['back']}")
